"""One rollout on a device: the same layout as `Rollout`, in torch tensors that never leave it."""

from __future__ import annotations

import torch

from flatout.buffers.batch import torch_dtype
from flatout.buffers.rollout import RolloutTensors, rollout_spec
from flatout.buffers.staging import Staging
from flatout.envs.spaces import ActionLayout, ObsLayout


class TensorRollout:
    """Transitions of `n_steps` × `n_envs`, allocated once on the device and written in place."""

    def __init__(
        self, obs: ObsLayout, action: ActionLayout, n_steps: int, n_envs: int, device: torch.device
    ) -> None:
        self.n_steps, self.n_envs = n_steps, n_envs
        spec = rollout_spec(obs, action, n_steps, n_envs)
        tensors = self.by_name = {
            name: torch.zeros(shape, dtype=torch_dtype(dtype), device=device)
            for name, (shape, dtype) in spec.items()
        }
        n_leaves = len(obs.specs)
        self.obs = tuple(tensors[f"obs.{i}"] for i in range(n_leaves))
        self.final_obs = tuple(tensors[f"final_obs.{i}"] for i in range(n_leaves))
        """Valid only where an episode was truncated."""
        self.action, self.log_prob, self.reward = (tensors[k] for k in ("action", "log_prob", "reward"))
        self.terminated, self.truncated = tensors["terminated"], tensors["truncated"]
        self.obs_rows = [tuple(leaf[t] for leaf in self.obs) for t in range(n_steps + 1)]
        """Observations of each time step, views made once so that acting makes none."""
        self.act_rows = [
            (
                tuple(leaf.numpy() for leaf in self.obs_rows[t]),
                self.action[t].numpy(),
                self.log_prob[t].numpy(),
            )
            for t in range(n_steps if device.type == "cpu" else 0)
        ]
        """In RAM: what acting reads and writes in each time step, as arrays."""

    @property
    def n_transitions(self) -> int:
        """`n_steps` × `n_envs`."""
        return self.n_steps * self.n_envs

    def tensors(self, staging: Staging) -> RolloutTensors:
        """The rollout as the learner takes it; nothing is copied where it learns on the same device."""
        # How many episodes were cut is known on the device only: one wait for it per rollout.
        device = staging.device
        index = (self.truncated & ~self.terminated).view(-1).nonzero().squeeze(1)
        return RolloutTensors(
            obs=tuple(leaf.to(device) for leaf in self.obs),
            action=self.action.to(device),
            log_prob=self.log_prob.to(device),
            reward=self.reward.to(device),
            terminated=self.terminated.to(device),
            truncated=self.truncated.to(device),
            final_obs=tuple(leaf.flatten(0, 1)[index].to(device) for leaf in self.final_obs),
            final_index=index.to(device),
        )
