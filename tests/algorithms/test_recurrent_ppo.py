"""Recurrent PPO: sequences against a step-by-step reference, states at the ends of episodes, and what can be learned."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flatout
from flatout.algorithms.recurrent_ppo.learner import RecurrentPPOLearner
from flatout.errors import FlatoutError
from flatout.models.memory import GRU, LSTM, Memory, RecurrentActorCritic, run_steps
from flatout.models.memory_kernel import run_fused
from tests.batched import MatchBatch, MatchTensors
from tests.known import Recall

SMALL: dict[str, Any] = {
    "n_envs": 4,
    "n_steps": 32,
    "batch_size": 64,
    "n_epochs": 2,
    "network_arch": (16,),
    "seed": 1,
    "executor": "serial",
    "overlap": "off",
}
FAST: dict[str, Any] = SMALL | {
    "n_envs": 16,
    "n_steps": 64,
    "batch_size": 256,
    "n_epochs": 4,
    "learning_rate": 2e-3,
    "network_arch": (32,),
}


def parameters(agent: flatout.Agent) -> list[torch.Tensor]:
    return [p.detach().clone() for p in agent.policy.model.parameters()]


def same(a: flatout.Agent, b: flatout.Agent) -> bool:
    return all(torch.equal(x, y) for x, y in zip(parameters(a), parameters(b), strict=True))


def learner_of(agent: flatout.Agent) -> RecurrentPPOLearner:
    learner = agent.trainer().learner
    assert isinstance(learner, RecurrentPPOLearner)
    return learner


@pytest.mark.parametrize("kind", [LSTM, GRU])
def test_fused_sequences_and_their_gradients_equal_single_steps(kind: type[Memory]) -> None:
    torch.manual_seed(0)
    memory = kind(3, 8)
    x, state = torch.randn(20, 5, 3), torch.randn(5, memory.n_state)
    keep = (torch.rand(20, 5) > 0.2).float()

    def run(how: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        inputs = x.clone().requires_grad_()
        out = how(memory, memory.gates_in(inputs), state, keep)
        return [out, *torch.autograd.grad((out * torch.arange(8.0)).sum(), [inputs, *memory.parameters()])]

    for slow, fast in zip(run(run_steps), run(run_fused), strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("memory", ["lstm:8", "gru:8"])
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("more", [{}, {"trunk": "shared", "sequence_length": 16}, {"normalize_obs": True}])
def test_sequences_give_the_values_and_log_probs_of_single_steps(
    env: str, memory: str, more: dict[str, Any]
) -> None:
    """What the update computes equals what was computed while collecting, over ends of episodes and of rollouts."""
    agent = flatout.PPO(env, memory=memory, **SMALL | more)
    agent.learn(8 * 128)
    trainer, learner = agent.trainer(), learner_of(agent)
    rollout = trainer.pipeline.rollouts[0]
    trainer.collector.publish()
    trainer.collector.collect(rollout, lambda: False)
    data = rollout.tensors(learner._staging)
    batch = learner.samples(data, 0)
    model = learner.model
    log_prob, _, value = model.evaluate(batch.obs, batch.action)
    torch.testing.assert_close(log_prob, batch.log_prob, rtol=0, atol=1e-5)
    torch.testing.assert_close(value, batch.value, rtol=0, atol=1e-5)

    length, n_envs = learner.config.length, agent.config.n_envs
    for s in range(len(batch)):  # sequences are ordered by time, then by env
        first, n = divmod(s, n_envs)
        t0 = first * length
        state = torch.from_numpy(rollout.obs[-1][t0, n][None].copy())
        for t in range(t0, t0 + length):
            obs = (*(torch.from_numpy(x[t, n][None]) for x in rollout.obs[:-1]), state)
            out = model.head.evaluate(model.policy(obs), torch.from_numpy(rollout.action[t, n][None]), None)
            assert out[0].item() == pytest.approx(log_prob[s, t - t0].item(), abs=1e-5)
            assert model.value(obs).item() == pytest.approx(value[s, t - t0].item(), abs=1e-5)
            state = model.act(obs, None)[2].detach()
            if rollout.terminated[t, n] or rollout.truncated[t, n]:
                state = torch.zeros_like(state)
    assert rollout.terminated.any() or env != "CartPole-v1"


def test_states_are_zero_where_an_episode_begins_and_kept_between_rollouts() -> None:
    agent = flatout.PPO(partial(Recall, 9), memory="lstm:8", **SMALL)
    agent.learn(128)
    trainer = agent.trainer()
    rollout = trainer.pipeline.rollouts[0]
    last = rollout.obs[-1][-1].copy()
    trainer.collector.collect(rollout, lambda: False)
    states, ended = rollout.obs[-1], rollout.terminated | rollout.truncated
    assert ended.any()
    np.testing.assert_array_equal(states[0], last)
    assert not states[1:][ended].any()
    assert np.abs(states[1:][~ended]).sum(1).all()


def test_a_truncated_episode_is_valued_with_the_state_after_its_last_action() -> None:
    agent = flatout.PPO("Pendulum-v1", memory="gru:8", **SMALL | {"n_steps": 250, "batch_size": 500})
    agent.learn(1000)
    rollout, model = agent.trainer().pipeline.rollouts[0], agent.policy.model
    assert isinstance(model, RecurrentActorCritic)
    t, n = 199, 2
    assert rollout.truncated[t, n]
    assert not rollout.terminated[t, n]
    before = tuple(torch.from_numpy(x[t, n][None]) for x in rollout.obs)
    after = flatout.PPO("Pendulum-v1", memory="gru:8", **SMALL).policy.model.act(before, None)[2]
    np.testing.assert_allclose(rollout.final_obs[-1][t, n][None], after.detach(), atol=1e-6)


@pytest.mark.parametrize("memory", ["lstm:32", "gru:32"])
def test_a_memory_learns_what_an_mlp_cannot(memory: str) -> None:
    agent = flatout.PPO(partial(Recall, 5), memory=memory, **FAST)
    agent.learn(60_000)
    assert agent.evaluate(100).return_mean >= 0.95
    plain = flatout.PPO(partial(Recall, 5), **FAST)
    plain.learn(10_000)
    assert plain.evaluate(100).return_mean <= 0.6


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_a_resumed_run_equals_the_whole(overlap: str, tmp_path: Path) -> None:
    def make() -> flatout.Agent:
        return flatout.PPO("CartPole-v1", memory="lstm:8", timesteps=1024, **SMALL | {"overlap": overlap})

    whole = make().learn(callback=None)
    half = make()
    half.learn(callback=lambda progress: progress.env_steps < 512)
    half.save(tmp_path / "half.flatout")
    resumed = flatout.load(tmp_path / "half.flatout").learn()
    assert isinstance(resumed, flatout.RecurrentPPO)
    assert same(whole, resumed)


def test_executors_and_collectors_learn_the_same() -> None:
    def learned(**how: Any) -> flatout.Agent:
        agent = flatout.PPO("CartPole-v1", memory="lstm:8", **SMALL | how).learn(512)
        agent.close()
        return agent

    one = learned()
    for how in (
        {"executor": "process", "n_workers": 2},
        {"executor": "auto", "n_collectors": 2},
        {"executor": "thread"},
    ):
        assert same(one, learned(**how)), how


@pytest.mark.parametrize("env", [MatchBatch, MatchTensors])
def test_batched_envs_have_states(env: Any) -> None:
    settings = {k: v for k, v in SMALL.items() if k != "executor"}
    agent = flatout.PPO(env, memory="gru:8", **settings)
    agent.learn(256)
    rollout = agent.trainer().pipeline.rollouts[0]
    ended, states = rollout.terminated | rollout.truncated, rollout.obs[-1]
    assert ended.any()
    assert not states[1:][ended].any()
    assert agent.evaluate(4).returns


def test_predict_takes_and_returns_the_state() -> None:
    agent = flatout.RecurrentPPO("CartPole-v1", memory="lstm:8", **SMALL)
    obs = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    action, first = agent.predict(obs, deterministic=True)
    assert action.shape == (3,)
    _, second = agent.predict(obs, first, np.array([False, True, False]), deterministic=True)
    np.testing.assert_array_equal(second[1], first[1])
    assert not np.array_equal(second[0], first[0])
    _, alone = agent.predict(obs[0], first[:1], np.array([False]), deterministic=True)
    np.testing.assert_allclose(alone, second[:1], atol=1e-6)
    with pytest.raises(FlatoutError, match="state has shape"):
        agent.predict(obs[0], first)


def test_evaluation_keeps_the_state_of_each_env() -> None:
    agent = flatout.PPO(partial(Recall, 3), memory="lstm:8", **SMALL)
    played = agent.evaluate(12)
    env, returns = Recall(3), []
    for seed in range(40):
        (obs, _), state, done = env.reset(seed=seed), None, False
        while not done:
            action, state = agent.predict(obs, state, deterministic=True)
            obs, reward, done, _, _ = env.step(int(action))
        returns.append(reward)
    assert set(played.lengths) == {4}
    assert 0 <= played.return_mean <= 1
    assert len(set(returns)) <= 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory": "rnn:8"}, "must be lstm:N or gru:N"),
        ({"memory": "lstm"}, "must be lstm:N or gru:N"),
        ({"memory": "lstm:8", "algo": "dqn"}, "is a setting of RECURRENT-PPO, not of DQN"),
        ({"memory": "lstm:8", "batch_size": 48}, "not a multiple of the sequence length"),
        ({"memory": "lstm:8", "sequence_length": 5}, "does not divide --n-steps"),
        ({"memory": "lstm:8", "compile": "on"}, "use --compile auto"),
        ({"memory": "lstm:8", "preset": "heavy"}, "has no settings for RECURRENT-PPO"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(FlatoutError, match=message):
        flatout.Agent("CartPole-v1", **{"n_steps": 32, **settings})


def test_minibatches_are_whole_sequences_by_default() -> None:
    for n_envs, n_steps in ((3, 100), (8, 64), (1, 512), (16, 20)):
        config = flatout.PPO("CartPole-v1", memory="lstm:8", n_envs=n_envs, n_steps=n_steps).config
        assert config.algorithm.batch_size % n_steps == 0
        assert config.total_batch % config.algorithm.batch_size == 0
