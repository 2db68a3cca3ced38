"""Every way to name an env, and the one line a user gets when a name or its arguments are wrong."""

from __future__ import annotations

import functools
import importlib.util
import pickle
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from flatout.envs.loader import load_object
from flatout.envs.make import env_factory
from flatout.envs.spaces import logit_sizes
from flatout.envs.wrappers import MaskFromInfo
from flatout.errors import EnvError, FlatoutError, one_line, where

ENV_FILE = """
import gymnasium as gym
from neighbour_of_env import SIZE

class Corridor(gym.Env):
    observation_space = gym.spaces.Discrete(SIZE)
    action_space = gym.spaces.Discrete(2)
    def __init__(self, slope=1.0):
        self.slope = slope
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {}

def make_corridor(slope=2.0):
    import late_neighbour_of_env
    return Corridor(slope)

not_an_env = 3
"""


class Steep(gym.Env[Any, Any]):
    observation_space = spaces.Box(-1, 1, (2,))
    action_space = spaces.Discrete(2)

    def __init__(self, slope: float, render_mode: str | None = None) -> None:
        if slope < 0:
            raise ValueError("slope is\nnegative")
        self.slope = slope
        self.render_mode = render_mode


class Masked(gym.Env[Any, Any]):
    """Its info carries the mask, until `masks` runs out."""

    observation_space = spaces.Box(-1, 1, (2,))
    action_space = spaces.MultiDiscrete([2, 3])

    def __init__(self, masks: list[Any]) -> None:
        self.masks = list(masks)

    def _info(self) -> dict[str, Any]:
        return {"action_mask": self.masks.pop(0)} if self.masks else {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(2, np.float32), self._info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.ones(2, np.float32), 1.0, False, False, self._info()


class BoundToNothing:
    pass


def make_steep(slope: float = 1.0) -> gym.Env[Any, Any]:
    return Steep(slope)


@pytest.fixture
def env_file(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "neighbour_of_env.py").write_text("SIZE = 5\n")
    (tmp_path / "late_neighbour_of_env.py").write_text("")
    file = tmp_path / "corridor.py"
    file.write_text(ENV_FILE)
    yield file
    for name in ("neighbour_of_env", "late_neighbour_of_env"):
        sys.modules.pop(name, None)


def line(error: pytest.ExceptionInfo[FlatoutError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def refusal(source: Any, kwargs: dict[str, Any] | None = None) -> str:
    """The one line that naming or making this env ends in."""
    with pytest.raises(FlatoutError) as error:
        env_factory(source, kwargs)()
    return line(error)


def layers(env: gym.Env[Any, Any]) -> list[type]:
    found: list[type] = [type(env)]
    while isinstance(env, gym.Wrapper):
        env = env.env
        found.append(type(env))
    return found


def test_id_keeps_its_time_limit_and_drops_the_checking_wrappers() -> None:
    factory = env_factory("CartPole-v1")
    env = factory()
    assert factory.name == "CartPole-v1"
    assert TimeLimit in layers(env)
    assert OrderEnforcing not in layers(env)
    assert PassiveEnvChecker not in layers(env)
    assert gym.spec("CartPole-v1").order_enforce, "the registered spec must stay as it was"


def test_id_takes_constructor_arguments_and_an_episode_limit() -> None:
    env = env_factory("FrozenLake-v1", {"map_name": "8x8", "max_episode_steps": 3})()
    assert isinstance(env.observation_space, spaces.Discrete)
    assert env.observation_space.n == 64
    env.reset(seed=0)
    assert [env.step(0)[3] for _ in range(3)] == [False, False, True]


def test_render_mode_is_given_at_each_call() -> None:
    factory = env_factory("CartPole-v1")
    assert factory().render_mode is None
    assert factory(render_mode="rgb_array").render_mode == "rgb_array"
    assert env_factory(Steep, {"slope": 1})(render_mode="rgb_array").render_mode == "rgb_array"


def test_render_mode_that_a_factory_does_not_take_is_refused() -> None:
    with pytest.raises(
        FlatoutError, match="'render_mode'; it takes slope; to render, let it take render_mode"
    ) as error:
        env_factory(make_steep)(render_mode="rgb_array")
    line(error)


@pytest.mark.parametrize(
    ("env_id", "words"),
    [
        ("CartPol-v1", "unknown env 'CartPol-v1'; did you mean 'CartPole-v1'?"),
        ("cartpole-v1", "unknown env 'cartpole-v1'; did you mean 'CartPole-v1'?"),
        ("LunarLander", "unknown env 'LunarLander'; did you mean 'LunarLander-v3'?"),
        (
            "CartPole-v7",
            "unknown env 'CartPole-v7'; 'CartPole' is registered as 'CartPole-v0', 'CartPole-v1'",
        ),
        ("Nowhere/Pong-v5", "'package:Nowhere/Pong-v5'"),
        ("qqqqqqqqqqqq", "give a Gymnasium id, 'module:Id-v0' or 'file.py:factory'"),
        ("", "unknown env ''"),
    ],
)
def test_unknown_id_names_what_exists(env_id: str, words: str) -> None:
    with pytest.raises(FlatoutError) as error:
        env_factory(env_id)
    assert words in line(error)


def test_missing_extra_says_what_to_install() -> None:
    if _installed("mujoco"):
        pytest.skip("mujoco is installed")
    assert 'pip install "flatout[mujoco]"' in refusal("Ant-v5")


def test_missing_package_is_named() -> None:
    if _installed("jax"):
        pytest.skip("jax is installed")
    text = refusal("phys2d/CartPole-v1")
    assert "needs the package 'jax', which is not installed (cartpole.py:" in text
    assert text.endswith("pip install jax")


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def test_module_in_the_current_folder_registers_its_env(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "local_registration.py").write_text(
        "import gymnasium as gym\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "gym.register('LocalPole-v0', entry_point='local_entry:Pole', max_episode_steps=7)\n"
        "class Direct(CartPoleEnv): pass\n"
    )
    (tmp_path / "local_entry.py").write_text(
        "from gymnasium.envs.classic_control import CartPoleEnv\nclass Pole(CartPoleEnv): pass\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    path_before = list(sys.path)
    factory = env_factory("local_registration:LocalPole-v0")
    assert factory.name == "local_registration:LocalPole-v0"
    assert type(factory().unwrapped).__name__ == "Pole"
    assert type(env_factory("local_registration:Direct")()).__name__ == "Direct"
    assert sys.path == path_before
    words = "module 'local_registration' has no env 'LocalPol-v0'; did you mean 'LocalPole-v0'?"
    assert refusal("local_registration:LocalPol-v0") == words
    assert refusal("local_registration:Direkt").endswith("did you mean 'Direct'?")
    gym.registry.pop("LocalPole-v0")


def test_module_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "raises_on_import.py").write_text("\nsize = 1 / 0\n")
    (tmp_path / "lacks_a_package.py").write_text("import no_such_package_here\n")
    (tmp_path / "leaves_on_import.py").write_text("import sys\nsys.exit('usage: ...')\n")
    monkeypatch.chdir(tmp_path)
    assert refusal("no_such_module:X-v0").startswith(
        "env 'no_such_module:X-v0': there is no module 'no_such_module'"
    )
    assert (
        "importing 'raises_on_import' failed: ZeroDivisionError: division by zero (raises_on_import.py:2)"
        in (refusal("raises_on_import:X-v0"))
    )
    assert "No module named 'no_such_package_here' (lacks_a_package.py:1)" in refusal("lacks_a_package:X-v0")
    assert "SystemExit: usage: ... (leaves_on_import.py:2)" in refusal("leaves_on_import:X-v0")


def test_file_gives_a_class_or_a_function(env_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(env_file.parent)
    path_before = list(sys.path)
    by_class = env_factory("corridor.py:Corridor", {"slope": 4.0})
    by_function = env_factory("corridor.py:make_corridor")
    assert by_function.name == "corridor.py:make_corridor"
    monkeypatch.chdir("/")
    assert by_class().unwrapped.slope == 4.0  # type: ignore[attr-defined]
    assert by_function().unwrapped.slope == 2.0  # type: ignore[attr-defined]
    assert type(by_class()) is type(by_function())
    assert sys.path == path_before


def test_file_factory_survives_a_process_that_never_saw_the_file(env_file: Path) -> None:
    data = pickle.dumps(env_factory(f"{env_file}:make_corridor"))
    for name in [name for name in sys.modules if name.startswith("flatout_file_")]:
        del sys.modules[name]
    assert pickle.loads(data)().observation_space == spaces.Discrete(5)


def test_an_edited_file_is_new_code_for_new_factories_and_the_old_code_for_others(env_file: Path) -> None:
    source = f"{env_file}:make_corridor"
    before = env_factory(source)
    env_file.write_text(env_file.read_text().replace("slope=2.0", "slope=3.0"))
    after = env_factory(source)
    sent = pickle.loads(pickle.dumps(before))
    env_file.unlink()
    for name in [name for name in sys.modules if name.startswith("flatout_file_")]:
        del sys.modules[name]
    assert [make().unwrapped.slope for make in (before, sent, after)] == [2.0, 2.0, 3.0]  # type: ignore[union-attr]


def test_an_id_that_only_this_process_has_registered_can_be_made_in_another() -> None:
    gym.register("OnlyHere-v0", entry_point=f"{__name__}:Steep", kwargs={"slope": 5.0})
    data = pickle.dumps(env_factory("OnlyHere-v0"))
    gym.registry.pop("OnlyHere-v0")
    assert pickle.loads(data)().unwrapped.slope == 5.0


def test_a_vec_env_of_stable_baselines3_is_answered_with_what_to_give() -> None:
    common = pytest.importorskip("stable_baselines3.common.vec_env")
    envs = common.DummyVecEnv([lambda: gym.make("CartPole-v1")])
    with pytest.raises(
        FlatoutError, match=r"DummyVecEnv is of Stable-Baselines3; give what makes one env, .* n_envs=4"
    ):
        env_factory(envs)


def test_wrong_name_in_a_file_gets_the_nearest(env_file: Path) -> None:
    assert "has no 'make_corider'; did you mean 'make_corridor'" in refusal(f"{env_file}:make_corider")
    assert "has no 'zzz'; it has Corridor, make_corridor" in refusal(f"{env_file}:zzz")
    assert "'not_an_env' in env file" in refusal(f"{env_file}:not_an_env")
    assert refusal(str(env_file)).endswith(f"gym.Env class that makes the env: '{env_file}:Corridor'")
    assert refusal("nowhere.py") == "env file 'nowhere.py' does not exist"
    missing = refusal(f"{env_file.parent}/corider.py:Corridor")
    assert missing.endswith("corider.py' does not exist; did you mean 'corridor.py'?")


def test_file_that_cannot_be_imported_names_the_line(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("import gymnasium\n\ndef make(:\n    pass\n")
    assert refusal(f"{file}:make").endswith(
        "could not be imported: SyntaxError: invalid syntax (broken.py:3)"
    )
    file.write_text("import gymnasium\n\n\nvalue = {}['x']\n")
    assert refusal(f"{file}:make").endswith("could not be imported: KeyError: 'x' (broken.py:4)")
    file.write_text(ENV_FILE.replace("from neighbour_of_env import SIZE", "SIZE = 2"))
    assert env_factory(f"{file}:Corridor")(), "a failed import must not stick"


def test_a_file_is_whole_for_every_thread_that_needs_it_at_once(tmp_path: Path) -> None:
    file = tmp_path / "slow_to_import.py"
    file.write_text(
        f"import time\ntime.sleep(0.2)\nfrom {__name__} import Steep\ndef make(): return Steep(1.0)\n"
    )
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda factory: factory(), [env_factory(f"{file}:make")] * 4))
    assert all(isinstance(env, Steep) for env in made)


def test_class_function_partial_and_lambda() -> None:
    assert env_factory(Steep).name == f"{__name__}:Steep"
    assert env_factory(make_steep).name == f"{__name__}:make_steep"
    partial = env_factory(functools.partial(make_steep, slope=3.0))
    assert partial.name == f"{__name__}:make_steep"
    assert partial().unwrapped.slope == 3.0  # type: ignore[attr-defined]
    assert isinstance(env_factory(lambda: Steep(1.0))(), Steep)
    assert isinstance(pickle.loads(pickle.dumps(env_factory(Steep, {"slope": 1})))(), Steep)


def test_factory_keeps_its_own_arguments() -> None:
    kwargs = {"slope": 1.0}
    factory = env_factory(Steep, kwargs)
    kwargs["slope"] = 9.0
    assert factory().unwrapped.slope == 1.0  # type: ignore[attr-defined]


@pytest.mark.parametrize("source", [3, None])
def test_objects_that_cannot_make_envs_are_refused(source: Any) -> None:
    assert "a gym.Env class, a function that makes one" in refusal(source)


def test_wrong_arguments_name_the_accepted_ones() -> None:
    words = "env 'CartPole-v1' takes no argument 'gravty'; it takes sutton_barto_reward, render_mode"
    assert words in refusal("CartPole-v1", {"gravty": 1})
    assert "takes no argument 'slop'; it takes slope, render_mode" in refusal(Steep, {"slop": 1})
    assert "takes no argument 'slop'; it takes none" in refusal(lambda: Steep(1.0), {"slop": 1})
    assert "needs the argument 'slope'" in refusal(Steep)


def test_constructor_that_raises_is_quoted_with_its_line() -> None:
    with pytest.raises(EnvError) as error:
        env_factory(Steep, {"slope": -1})()
    start = f"env '{__name__}:Steep' could not be created: ValueError: slope is negative (test_make.py:"
    assert line(error).startswith(start)
    assert isinstance(error.value.__cause__, ValueError)


def test_registered_constructor_that_raises_is_quoted_with_its_own_words() -> None:
    def fail(**kwargs: Any) -> gym.Env[Any, Any]:
        raise TypeError("wrong kind of wood")

    gym.register("WoodenTest-v0", entry_point=fail)
    text = refusal("WoodenTest-v0")
    gym.registry.pop("WoodenTest-v0")
    assert text.startswith(
        "env 'WoodenTest-v0' could not be created: TypeError: wrong kind of wood (test_make.py:"
    )


def test_what_is_not_a_gymnasium_env_is_refused() -> None:
    old = type("Env", (), {"__module__": "gym.core"})
    assert "made an object of type" in refusal(BoundToNothing)
    assert "made None; return an instance of gymnasium.Env" in refusal(lambda: None)
    assert "port it to gymnasium" in refusal(type("OldEnv", (old,), {}))
    assert "made a batched CartPoleVectorEnv; a single env" in refusal(lambda: gym.make_vec("CartPole-v1", 2))


def test_mask_moves_from_info_into_the_observation() -> None:
    masks = [np.array([1, 0, 1, 1, 0], bool), (np.array([0, 1]), np.array([1, 0, 0]))]
    factory = replace(env_factory(Masked, {"masks": masks}), mask_in_info=True)
    env = factory()
    assert env.observation_space == spaces.Dict(
        {"obs": Masked.observation_space, "action_mask": spaces.MultiBinary(5)}
    )
    first, _ = env.reset(seed=0)
    second = env.step(env.action_space.sample())[0]
    assert first["action_mask"].tolist() == [1, 0, 1, 1, 0]
    assert second["action_mask"].tolist() == [0, 1, 1, 0, 0]
    assert second["obs"].tolist() == [1, 1]
    assert env.observation_space.contains(first)
    with pytest.raises(EnvError, match=r"step\(\) gave no info\['action_mask'\]") as error:
        env.step(env.action_space.sample())
    line(error)


def test_mask_of_the_wrong_size_is_refused() -> None:
    env = MaskFromInfo(Masked([[1, 1, 1]]))
    with pytest.raises(EnvError, match="of 3 values; the action space has 5 choices") as error:
        env.reset()
    line(error)


@pytest.mark.parametrize(
    ("space", "sizes"),
    [
        (spaces.Discrete(4, start=2), (4,)),
        (spaces.MultiDiscrete(np.array([[2, 3], [4, 5]])), (2, 3, 4, 5)),
        (spaces.MultiBinary(3), (2, 2, 2)),
        (spaces.Box(-1, 1, (2,)), ()),
    ],
)
def test_logit_sizes(space: gym.Space[Any], sizes: tuple[int, ...]) -> None:
    assert logit_sizes(space) == sizes


def test_place_of_an_error_is_the_users_line_not_the_library_it_called() -> None:
    with pytest.raises(np.linalg.LinAlgError) as error:
        np.linalg.inv(np.zeros((2, 2)))
    assert where(error.value).startswith("test_make.py:")
    assert one_line(error.value).startswith("LinAlgError: Singular matrix (test_make.py:")


def test_error_without_text_or_traceback_is_still_one_line() -> None:
    assert one_line(ValueError()) == "ValueError"
    assert one_line(ValueError("a\n  b")) == "ValueError: a b"


def test_object_of_any_kind_is_loaded_from_a_file_or_a_module(tmp_path: Path) -> None:
    file = tmp_path / "numbers_of_mine.py"
    file.write_text("answer = 42\nword = 'forty-two'\n")

    def is_int(value: object) -> bool:
        return isinstance(value, int)

    assert load_object(f"{file}:answer", "number", is_int, "an int") == 42
    assert load_object("math:floor", "function")(2.5) == 2
    with pytest.raises(
        FlatoutError, match=r"'word' in number file '.*' is an object of type str, not an int"
    ):
        load_object(f"{file}:word", "number", is_int, "an int")
    with pytest.raises(FlatoutError, match=r"number file '.*' has no 'anser'; did you mean 'answer'\?"):
        load_object(f"{file}:anser", "number", is_int, "an int")
