"""Complete scripts after Stable-Baselines3's documentation run with one import changed, or are refused in one line."""

from __future__ import annotations

import re
import runpy
import warnings
from pathlib import Path

import pytest

from flatout.errors import FlatoutError

pytest.importorskip("stable_baselines3", reason="the scripts use Stable-Baselines3's envs and callbacks")

SCRIPTS = Path(__file__).parent / "scripts"
STEPS = {"eval_callback": 520, "feature_extractor": 128, "reward_threshold": 10**7, "max_episodes": 10**7}
"""Env steps of scripts that need others than the usual few."""
FEW = 220
REASONS = {
    "her": "replay_buffer_class=HerReplayBuffer has no counterpart",
    "own_policy_class": "policy 'CustomActorCriticPolicy' has no counterpart",
    "compiled_policy": "model.policy cannot be replaced",
    "policy_alone": "model.policy has no save",
}


def run(script: Path, folder: Path) -> None:
    """Run a script as a user would, with fewer steps."""
    text = re.sub(r"^STEPS = .*$", f"STEPS = {STEPS.get(script.stem, FEW)}", script.read_text(), flags=re.M)
    # Images, with the default of 20,000 samples per rollout, would take half a minute.
    text = text.replace(
        '"MultiInputPolicy", env, verbose=1', '"MultiInputPolicy", env, n_steps=64, n_epochs=1'
    )
    (folder / script.name).write_text(text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Stable-Baselines3 warns about its own envs
        runpy.run_path(str(folder / script.name), run_name="__main__")


@pytest.mark.parametrize("script", sorted((SCRIPTS / "mapped").glob("*.py")), ids=lambda it: it.stem)
def test_a_script_of_the_documentation_runs(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(script, tmp_path)


@pytest.mark.parametrize("script", sorted((SCRIPTS / "refused").glob("*.py")), ids=lambda it: it.stem)
def test_what_cannot_be_mapped_is_refused_in_one_line(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((FlatoutError, AttributeError), match=re.escape(REASONS[script.stem])) as caught:
        run(script, tmp_path)
    assert "\n" not in str(caught.value)
