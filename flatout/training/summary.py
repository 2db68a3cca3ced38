"""A run's summary.json, from the trainer's state."""

from __future__ import annotations

from typing import Any

from flatout.timing import busy_seconds, collect_seconds, run_phases
from flatout.training.trainer import Trainer


def summarize(
    trainer: Trainer, *, status: str, startup_seconds: float, error: str | None = None
) -> dict[str, Any]:
    """The run's summary.json."""
    config, state = trainer.config, trainer.state
    lanes, wall = state.lanes or {"learner": {}}, state.wall_seconds
    phases, collect = run_phases(lanes, overlapped=trainer.overlap), collect_seconds(lanes)
    busy = busy_seconds(lanes)
    rate, collect_rate, learn_rate = (
        state.env_steps / seconds if seconds > 0 else None for seconds in (wall, collect, busy)
    )
    limit = min(collect_rate, learn_rate) if collect_rate and learn_rate else None
    if collect_rate and learn_rate and trainer.envs_on_accelerator:  # both take turns on one device
        limit = 1 / (1 / collect_rate + 1 / learn_rate)
    return {
        "status": status,
        "error": error,
        **trainer.describe(),
        "env_steps": state.env_steps,
        "updates": state.n_updates,
        "startup_seconds": startup_seconds,
        "wall_seconds": wall,
        "steps_per_second": rate,
        "episodes": state.n_episodes,
        "return_mean": state.returns.mean,
        "return_std": state.returns.std,
        "eval_return_mean": state.eval_returns.mean,
        "eval_return_std": state.eval_returns.std,
        "eval_episodes": len(state.eval_returns),
        "target_return": config.target_return,
        "target_reached_seconds": state.target_reached_seconds,
        "target_reached_steps": state.target_reached_steps,
        "learner_busy": busy / wall if wall > 0 else None,
        "phases": phases,
        "lanes": lanes,
        "collect_rate": collect_rate,
        "learn_rate": learn_rate,
        "pipeline_efficiency": rate / limit if rate and limit else None,
        "policy_lag_mean": state.lag_sum / max(state.iteration, 1),
        "policy_lag_max": state.lag_max,
        "precision": trainer.precision,
        "measured": trainer.measured,
        "compiled": trainer.compiled,
        "backend": trainer.learner.update.backend,
        "restarts": trainer.budget.n_restarts,
        "oom_backoffs": trainer.learner.n_backoffs,
        "nan_skips": state.nan_skips,
    }
