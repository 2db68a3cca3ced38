from __future__ import annotations

from typing import Any

from flatout.views.text import _outcome, differ_much, summary_text

FULL: dict[str, Any] = {
    "status": "finished",
    "env": "CartPole-v1",
    "algo": "ppo",
    "preset": "fast",
    "seed": 1,
    "device": "cpu",
    "env_steps": 500_000,
    "updates": 3600,
    "startup_seconds": 1.23,
    "wall_seconds": 27.44,
    "steps_per_second": 18_221.6,
    "episodes": 1204,
    "return_mean": 486.2,
    "return_std": 12.04,
    "target_return": 475.0,
    "target_reached_seconds": 12.3,
    "target_reached_steps": 231_000,
    "learner_busy": 0.61,
    "device_utilization": None,
    "device_energy_joules": None,
    "phases": {"collect": 9.9, "learn": 16.7, "evaluate": 0.8, "publish": 0.01},
    "collect_rate": 52_000.0,
    "learn_rate": 29_000.0,
    "pipeline_efficiency": 0.63,
    "executor": {"kind": "serial", "collectors": 1, "workers": 0, "reason": "cheapest of 3 measured"},
    "policy_lag_mean": 0.0,
    "policy_lag_max": 0,
    "restarts": 0,
    "oom_backoffs": 0,
    "nan_skips": 0,
    "folder": "runs/x",
}


def test_a_finished_run_shows_its_result_and_where_the_time_went() -> None:
    lines = summary_text(FULL).splitlines()
    assert len(lines) <= 12
    assert lines[0] == "finished      500,000 env steps in 27.4 s, 18,222 steps/s, after 1.2 s to start"
    assert "return        486.2 ± 12.0 over the last 100 of 1,204 episodes" in lines
    assert "target        475.0 reached after 12.3 s and 231,000 env steps" in lines
    assert "learner busy  61 % of the time" in lines
    assert "time went to  learn 61 %, collect 36 %, evaluate 3 %" in lines
    assert any("learning is the limit, 63 % of it reached" in line for line in lines)
    assert "executor      serial, 1 collector (cheapest of 3 measured)" in lines
    assert lines[-1] == "folder        runs/x"


def test_an_empty_summary_is_no_error() -> None:
    assert summary_text({}) == "ended         0 env steps\nreturn        not known: no episode ended"
    nulls = dict.fromkeys(FULL)
    assert "None" not in summary_text(nulls)
    assert "nan" not in summary_text({**FULL, "return_mean": float("nan"), "wall_seconds": float("nan")})


def test_a_missed_target_and_restarts_are_shown() -> None:
    text = summary_text(
        {
            **FULL,
            "status": "stopped",
            "target_reached_seconds": None,
            "target_reached_steps": None,
            "device_utilization": 0.43,
            "policy_lag_mean": 1.0,
            "policy_lag_max": 1,
            "restarts": 2,
            "nan_skips": 1,
        }
    )
    assert text.startswith("stopped ")
    assert "475.0 not reached" in text
    assert "device utilisation 43 %" in text
    assert "2 worker restarts, 1 NaN updates skipped" in text
    assert len(text.splitlines()) <= 12


def test_a_return_over_few_episodes_and_a_run_without_one_say_so() -> None:
    few = summary_text({**FULL, "episodes": 2})
    assert "486.2 ± 12.0 over the last 2 of 2 episodes" in few
    assert _outcome({**FULL, "episodes": 2}).endswith("return 486.2 ± 12.0 over 2 episodes.")
    assert _outcome({**FULL, "episodes": 1}).endswith("over 1 episode.")
    assert _outcome(FULL).endswith("return 486.2 ± 12.0.")
    none = summary_text({**FULL, "return_mean": None, "episodes": 0})
    assert "no episode ended; if the env never ends one, give it a limit" in none


def test_a_deterministic_policy_that_differs_much_from_the_sampled_one_is_told() -> None:
    walker = {
        "return_mean": 94.0,
        "return_std": 80.0,
        "episodes": 300,
        "eval_return_std": 10.0,
        "eval_episodes": 20,
    }
    assert "differs much" in summary_text({**FULL, **walker, "eval_return_mean": -75.0})
    near = summary_text({**FULL, **walker, "eval_return_mean": 110.0})
    assert "evaluation    110.0 ± 10.0 over 20 episodes of the deterministic policy" in near
    assert "differs" not in near
    assert not differ_much((0.0, 0.0, 2), (5.0, 0.0, 100))  # two episodes show nothing
    assert not differ_much((None, None, 0), (5.0, 0.0, 100))
    assert differ_much((0.0, 0.0, 20), (5.0, 0.0, 100))
