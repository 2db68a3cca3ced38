"""A user's own network, optimizer and schedule train like built-in ones: every algorithm, collectors, resume, loading."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

import flatout
from examples.attention import Attention, Gather
from flatout.config.run_config import RunConfig, resolve
from flatout.envs.spaces import ActionLayout, ObsLayout
from flatout.errors import FlatoutError
from flatout.models.config import NetworkConfig
from flatout.models.policy import ActorCritic, QNetwork, build
from tests import command
from tests.known import Match

EXAMPLE = Path(__file__).parents[2] / "examples" / "attention.py"
ROLLOUTS: dict[str, Any] = {"n_envs": 4, "n_steps": 32, "batch_size": 64, "seed": 1, "overlap": "off"}
DQN: dict[str, Any] = {"algo": "dqn", "n_envs": 4, "learning_starts": 64, "seed": 1, "overlap": "off"}


class Wide(nn.Module):
    """Takes encoded observations."""

    def __init__(self, n_features: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(n_features, 24), nn.GELU())
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.unused = nn.Linear(3, 3)

    def forward(self, features: Tensor) -> Tensor:
        out: Tensor = self.layers(features)
        return out


class Seen(nn.Module):
    """Remembers the observation that it is given, and returns two features."""

    def __init__(self, observation_space: gym.Space[Any]) -> None:
        super().__init__()
        self.space = observation_space
        self.seen: Any = None

    def forward(self, obs: Any) -> Tensor:
        self.seen = obs
        first = obs["image"] if isinstance(obs, dict) else obs
        features: Tensor = first.reshape(len(first), -1)[:, :2].float()
        return features


def own(network: Any, **settings: Any) -> NetworkConfig:
    config: NetworkConfig = resolve(
        "CartPole-v1", {"network": network, **settings}, device="cpu", n_cores=2
    ).network
    return config


def params(agent: flatout.Agent) -> Tensor:
    return torch.cat([p.detach().flatten() for p in agent.policy.model.parameters()])


SAC: dict[str, Any] = {
    "algo": "sac",
    "n_envs": 4,
    "batch_size": 64,
    "learning_starts": 64,
    "train_ratio": 0.25,
    "network_arch": (32,),
    "env_kwargs": {"continuous": True},
    "seed": 1,
}
RECURRENT = ROLLOUTS | {"algo": "recurrent-ppo", "memory": "gru:16"}


def test_the_example_can_be_seen() -> None:
    env = Gather(render_mode="rgb_array")
    env.reset(seed=1)
    before = env.render()
    env.step(0)
    assert before.shape == (240, 240, 3)
    assert (env.render() != before).any()


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["ppo", "dqn", "pqn", "sac"])
def test_attention_over_entities_learns_by_every_algorithm(algo: str) -> None:
    settings: dict[str, Any] = {
        "ppo": {"n_envs": 8, "n_steps": 64, "batch_size": 128, "learning_rate": 2e-3, "n_epochs": 6},
        "dqn": {
            "n_envs": 8,
            "learning_rate": 2e-3,
            "target_update_interval": 250,
            "exploration_fraction": 0.3,
        },
        "pqn": {"n_envs": 8, "learning_rate": 1e-3},
        "sac": SAC | {"learning_rate": 2e-3, "gamma": 0.95, "tau": 0.02},
    }[algo]
    settings |= {"algo": algo, "seed": 1}
    agent = flatout.Agent(Gather, **settings, network=Attention, overlap="off")
    random = agent.evaluate(40, deterministic=False).return_mean
    agent.learn(16_000)
    assert agent.evaluate(40).return_mean > random + 0.7
    assert agent.summary["backend"] in ("eager", "compiled")
    agent.close()


def test_a_dict_observation_arrives_in_its_structure_without_text_and_with_channels_first() -> None:
    space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (8, 8, 3), np.uint8),
            "where": spaces.Tuple((spaces.Discrete(5, start=2), spaces.Box(-1, 1, (2,)))),
            "mission": spaces.Text(9),
            "flags": spaces.MultiBinary(3),
            "action_mask": spaces.MultiBinary(2),
        }
    )
    obs = ObsLayout(space)
    model = ActorCritic(obs, ActionLayout(spaces.Discrete(2)), own(Seen))
    sample = {**space.sample(), "action_mask": np.array([1, 0], np.int8)}
    arrays, _ = obs.batch(sample)
    model.both(tuple(map(torch.from_numpy, arrays)))
    module: Any = model.pi_encoder.module
    seen = module.seen
    assert module.space["image"] == spaces.Box(0, 255, (3, 8, 8), np.uint8)
    assert set(seen) == set(module.space.spaces) == {"image", "where", "flags", "action_mask"}
    assert all(module.space[key] == space[key] for key in ("where", "flags", "action_mask"))
    assert torch.equal(
        seen["image"], torch.from_numpy(sample["image"][None]).permute(0, 3, 1, 2).float() / 255
    )
    assert int(seen["where"][0]) == sample["where"][0] - 2
    assert torch.equal(seen["where"][1], torch.from_numpy(sample["where"][1][None]))
    assert seen["flags"].dtype == torch.float32
    assert seen["action_mask"].dtype == torch.bool
    assert float(model.mode(tuple(map(torch.from_numpy, arrays)))) == 0


def test_hidden_layers_follow_or_not_and_critic_widths_may_differ() -> None:
    obs, action = ObsLayout(spaces.Box(-1, 1, (5,))), ActionLayout(spaces.Discrete(3))
    wide = build(obs, action, own(Wide, network_arch="pi=8,8;vf=16"), seed=0)
    assert [tuple(w.shape) for w, _ in wide.acting_layers()] == [(8, 24), (8, 8), (3, 8)]
    assert [tuple(w.shape) for w, _ in wide.value_layers()] == [(16, 24), (1, 16)]
    bare = build(obs, action, own(Wide, network_arch="none"), seed=0)
    assert [tuple(w.shape) for w, _ in bare.acting_layers()] == [(3, 24)]
    assert tuple(
        QNetwork(obs, action, own(Wide, network_arch=()), dueling=True)((torch.zeros(2, 5),)).shape
    ) == (
        2,
        3,
    )
    with pytest.raises(FlatoutError, match="--network-arch none: only after images or a network of your own"):
        build(obs, action, NetworkConfig(network_arch=()), seed=0)


def test_policy_and_critic_widths_are_given_as_a_dict_or_as_text_and_stay_fused() -> None:
    text = resolve("CartPole-v1", {"network_arch": "pi=8,8;vf=32,16"}, device="cpu", n_cores=2)
    given = resolve("CartPole-v1", {"network_arch": {"pi": [8, 8], "vf": [32, 16]}}, device="cpu", n_cores=2)
    assert text == given
    assert (text.network.network_arch, text.network.vf_arch) == ((8, 8), (32, 16))
    assert RunConfig.from_json(json.loads(json.dumps(text.to_json())), "test") == text
    agent = flatout.PPO("CartPole-v1", network_arch={"pi": [8, 8], "vf": [32, 16]}, **ROLLOUTS)
    agent.learn(256)
    assert agent.summary["backend"] == "fused"
    agent.close()
    with pytest.raises(FlatoutError, match=r"names 'pu'; it must be pi and vf.*did you mean 'pi'"):
        resolve("CartPole-v1", {"network_arch": "pu=8;vf=9"}, device="cpu", n_cores=2)
    with pytest.raises(FlatoutError, match="leave out --vf-arch"):
        resolve("CartPole-v1", {"vf_arch": "8", "trunk": "shared"}, device="cpu", n_cores=2)


def test_the_critics_of_sac_and_a_memorys_layers_have_their_own_widths() -> None:
    sac = flatout.SAC("Pendulum-v1", network=Wide, network_arch="pi=8;vf=16,12", seed=1)
    critics: Any = sac.policy.model.critics
    assert [tuple(w.shape) for w in critics.weights] == [(2, 25, 16), (2, 16, 12), (2, 12, 1)]
    for arch, shapes in (("pi=8;vf=12", [(2, 8), (1, 12)]), ("none", [(2, 16), (1, 16)])):
        agent = flatout.Agent("CartPole-v1", network=Wide, **(RECURRENT | {"network_arch": arch}))
        model: Any = agent.policy.model
        assert [tuple(out.weight.shape) for out in (model.pi_out, model.vf_out)] == shapes
        agent.learn(256)
        agent.close()


def test_parameters_that_are_frozen_or_unused_stay_as_they_are() -> None:
    for settings in (ROLLOUTS, DQN, {"algo": "sac", "env": "Pendulum-v1", "learning_starts": 32, "seed": 1}):
        agent = flatout.Agent(**({"env": "CartPole-v1"} | settings), network=Wide)
        own_part: Any = agent.policy.model.pi_encoder.module
        before = [p.detach().clone() for p in own_part.parameters()]
        agent.learn(128)
        after = list(own_part.parameters())
        changed = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
        assert changed == [True, True, False, False, False, False]
        agent.close()


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize(
    "settings",
    [ROLLOUTS, DQN | {"save_replay": True}, SAC | {"save_replay": True}, RECURRENT],
    ids=["ppo", "dqn", "sac", "recurrent-ppo"],
)
def test_collectors_learn_the_same_and_a_resumed_run_continues_to_the_bit(
    settings: dict[str, Any], overlap: str, tmp_path: Path
) -> None:
    # Not compiled: on a busy machine the eager updates take so long that `auto` would compile them in between.
    common = settings | {"network": Attention, "overlap": overlap, "compile": "off"}
    whole = flatout.Agent(Gather, n_collectors=2, **common).learn(512)
    assert whole.summary["executor"]["collectors"] == 2
    alone = flatout.Agent(Gather, executor="serial", **common).learn(512)
    assert torch.equal(params(whole), params(alone))
    first = flatout.Agent(Gather, n_collectors=2, timesteps=512, **common)
    first.learn(callback=lambda progress: progress.env_steps < 256)
    first.save(tmp_path / "half.flatout")
    again = flatout.load(tmp_path / "half.flatout", Gather).learn()
    assert again.summary["env_steps"] == 512
    assert torch.equal(params(again), params(whole))
    for agent in (whole, alone, first, again):
        agent.close()


def test_a_class_in_a_function_is_trained_saved_and_asked_for_back(tmp_path: Path) -> None:
    class Here(Wide):
        pass

    agent = flatout.PPO("CartPole-v1", network=Here, n_collectors=2, **ROLLOUTS).learn(256)
    assert agent.summary["executor"]["collectors"] == 2
    agent.save(tmp_path / "a.flatout")
    with pytest.raises(FlatoutError, match=r"give the network again: --network FILE\.py:NAME") as caught:
        flatout.load(tmp_path / "a.flatout")
    assert "\n" not in str(caught.value)
    again = flatout.load(tmp_path / "a.flatout", network=Here)
    assert torch.equal(params(again), params(agent))
    agent.close()
    plain = flatout.PPO("CartPole-v1", **ROLLOUTS)
    plain.save(tmp_path / "b.flatout")
    with pytest.raises(FlatoutError, match="has no network of your own"):
        flatout.load(tmp_path / "b.flatout", network=Here)


def run(*words: str, cwd: Path, code: int = 0) -> str:
    done = command.flatout(*words, cwd=cwd)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_file_is_named_on_the_command_line_and_given_back_when_it_has_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "mine"))
    (tmp_path / "net.py").write_text(EXAMPLE.read_text())
    flags = "--network net.py:Attention --n-envs 2 --n-steps 32 --batch-size 64 --timesteps 256".split()
    run("train", "net.py:Gather", *flags, "--run-name", "a", "--quiet", cwd=tmp_path)
    saved = json.loads((tmp_path / "runs/a/config.json").read_text())
    assert saved["network"]["network"] == f"{tmp_path}/net.py:Attention"
    assert len(saved["signature"]) == 64
    assert "return" in run("evaluate", "a", "--episodes", "2", cwd=tmp_path)
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "theirs"))
    line = run("evaluate", "a", "--episodes", "2", cwd=tmp_path, code=2)
    assert "is code, and no run of yours wrote this file" in line
    assert "the network" in line
    run("resume", "a", "--timesteps", "512", "--trust", "--quiet", cwd=tmp_path)
    (tmp_path / "net.py").rename(tmp_path / "moved.py")
    line = run("evaluate", "a", "--trust", cwd=tmp_path, code=2)
    assert "does not exist" in line
    assert "--network FILE.py:NAME" in line
    moved = ["--network", "moved.py:Attention"]
    assert "env file" in run("evaluate", "a", "--trust", *moved, cwd=tmp_path, code=2)


def test_the_doctor_times_it() -> None:
    found = flatout.doctor(Gather, network=Attention, **ROLLOUTS)
    assert found.steps_per_second > 0
    assert found.update_seconds > 0
    assert "Attention" in found.command


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (lambda observation_space: 3, "it must make an nn.Module"),
        (lambda n_features: nn.Linear(7, 2), "fails on a batch of two observations: RuntimeError"),
        (lambda n_features: nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.1)), "set dropout to 0"),
        (lambda n_features: nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)), "use LayerNorm"),
        (lambda n_features: nn.Flatten(0), r"returns \(8,\) for 2 observations; it must return features"),
        (lambda: nn.Identity(), "could not be made: TypeError"),
        ("os:system", "not an nn.Module class or a function"),
        ("subprocess:Popen", "not an nn.Module class or a function"),
        ("nowhere.py:Net", "does not exist"),
        ("Net", "it must be FILE.py:NAME, or in Python a class or function"),
    ],
)
def test_a_wrong_network_is_refused_in_one_line(network: Any, message: str) -> None:
    with pytest.raises(FlatoutError, match=message) as caught:
        flatout.PPO("CartPole-v1", network=network, **ROLLOUTS)
    assert "\n" not in str(caught.value)


def test_an_optimizer_of_ones_own_learns_and_resumes_to_the_bit(tmp_path: Path) -> None:
    rmsprop = functools.partial(torch.optim.RMSprop, alpha=0.9)
    settings = ROLLOUTS | {"optimizer": rmsprop, "learning_rate": 2e-3, "target_kl": 0.05}
    whole = flatout.PPO(Match, **settings, timesteps=4096).learn()
    assert whole.summary["backend"] == "eager"
    assert whole.evaluate(20).return_mean > flatout.PPO(Match, **ROLLOUTS).evaluate(20).return_mean
    half = flatout.PPO(Match, **settings, timesteps=4096)
    half.learn(callback=lambda progress: progress.env_steps < 2048)
    half.save(tmp_path / "half.flatout")
    again = flatout.load(tmp_path / "half.flatout", Match, optimizer=rmsprop).learn()
    assert torch.equal(params(again), params(whole))
    for agent in (whole, half, again):
        agent.close()


def test_adam_given_as_ones_own_optimizer_is_the_built_in_one() -> None:
    adam = functools.partial(torch.optim.Adam, eps=1e-5)
    built_in = flatout.PPO(Match, compile="off", **ROLLOUTS).learn(512)
    given = flatout.PPO(Match, optimizer=adam, **ROLLOUTS).learn(512)
    torch.testing.assert_close(params(given), params(built_in), atol=1e-5, rtol=1e-3)
    with pytest.raises(FlatoutError, match="optimizer 'builtins:int' failed"):
        flatout.PPO(Match, optimizer=int, **ROLLOUTS).learn(256)


def test_a_schedule_of_ones_own_is_a_function_of_the_progress(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def half(progress):\n    return 1.0 if progress < 0.5 else 0.5\n")
    rates = []
    agent = flatout.PPO(
        Match,
        learning_rate=1e-3,
        learning_rate_schedule=f"{tmp_path}/mine.py:half",
        timesteps=512,
        **ROLLOUTS,
    )
    agent.learn(callback=lambda progress: rates.append(progress.metrics["train/learning_rate"]))
    assert rates == pytest.approx([1e-3, 1e-3, 5e-4, 5e-4])
    clip = flatout.PPO(Match, clip_range_schedule=lambda progress: 1 - progress**2, **ROLLOUTS)
    clip.learn(256)
    with pytest.raises(FlatoutError, match=r"must be one of constant, linear, or FILE\.py:NAME"):
        flatout.PPO(Match, learning_rate_schedule="linaer", **ROLLOUTS)
