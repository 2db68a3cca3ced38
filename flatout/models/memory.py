"""Actor-critics with a memory: an LSTM or a GRU between the encoder and the hidden layers.

The state of the memory is the last array of an observation, so rollouts store it for every step, and a step of the
network is a function of the observation alone. Zeros are the state at the beginning of an episode.
S: sequences, L: steps of a sequence, H: width of a memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from flatout.envs.spaces import ActionLayout, Array, ArraySpec, ObsArrays, ObsLayout
from flatout.models.actor import KernelActor, TorchActor
from flatout.models.config import NetworkConfig
from flatout.models.policy import OUT_GAIN, ActorCritic, Obs, linear, mlp, seeded

SMALL_MEMORY = 1_000_000
"""Up to this many weights the compiled function acts faster than torch."""
LONGEST = 32
"""Steps for which the slowest units keep their state at first; the fastest ones keep half of it for one step."""
Run: TypeAlias = Callable[["Memory", Tensor, Tensor, Tensor], Tensor]
"""(memory, inputs (L, S, gates), first states (S, n_state), which steps go on with the state before, (L, S)) → (L, S, H)."""


class Memory(nn.Module):
    """A recurrent layer: gates of the inputs, gates of the output before, and the new state of both."""

    n_gates: int
    n_states: int
    """State vectors; the first is the output."""

    def __init__(self, n_in: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.n_state = self.n_states * width
        self.gates_in, self.gates_back = (
            nn.Linear(n_in, self.n_gates * width),
            nn.Linear(width, self.n_gates * width),
        )
        # The second gate keeps the state. Its bias spreads how long units remember at first, from 2 steps to LONGEST,
        # spaced logarithmically (Tallec and Ollivier 2018). Slow units take in little of a step, so their inputs weigh more.
        with torch.no_grad():
            log_times = torch.linspace(0.0, math.log(LONGEST), width)
            weight, times = self.gates_in.weight, log_times.exp()
            weight.normal_(std=n_in**-0.5).mul_((times / LONGEST).sqrt().repeat(self.n_gates)[:, None])
            for bias in (self.gates_in.bias, self.gates_back.bias):
                bias.zero_()
            self.gates_in.bias[width : 2 * width] = log_times

    def advance(self, gates: Tensor, state: Tensor) -> Tensor:
        """The state after a step, by the gates of its input."""
        raise NotImplementedError

    def step(self, x: Tensor, state: Tensor) -> Tensor:
        """The state after this input."""
        return self.advance(self.gates_in(x), state)


class LSTM(Memory):
    """Long short-term memory (Hochreiter and Schmidhuber 1997); gates: input, forget, cell, output."""

    n_gates, n_states = 4, 2

    def __init__(self, n_in: int, width: int) -> None:
        super().__init__(n_in, width)
        with torch.no_grad():
            bias = self.gates_in.bias
            bias[:width] = -bias[width : 2 * width]  # the state is a mean of what came in, not a sum

    def advance(self, gates: Tensor, state: Tensor) -> Tensor:
        out, cell = state.chunk(2, -1)
        gate_i, gate_f, gate_g, gate_o = (gates + self.gates_back(out)).chunk(4, -1)
        cell = gate_f.sigmoid() * cell + gate_i.sigmoid() * gate_g.tanh()
        return torch.cat([gate_o.sigmoid() * cell.tanh(), cell], -1)


class GRU(Memory):
    """Gated recurrent unit (Cho et al. 2014); gates: reset, update, new."""

    n_gates, n_states = 3, 1

    def advance(self, gates: Tensor, state: Tensor) -> Tensor:
        back_r, back_z, back_n = self.gates_back(state).chunk(3, -1)
        gate_r, gate_z, gate_n = gates.chunk(3, -1)
        new = (gate_n + (gate_r + back_r).sigmoid() * back_n).tanh()
        out: Tensor = new + (gate_z + back_z).sigmoid() * (state - new)
        return out


MEMORIES: dict[str, type[Memory]] = {"lstm": LSTM, "gru": GRU}


def run_steps(memory: Memory, gates: Tensor, state: Tensor, keep: Tensor) -> Tensor:
    """Outputs of whole sequences, step by step: the definition."""
    outputs = []
    for gates_now, keep_now in zip(gates.unbind(), keep.unsqueeze(-1).unbind(), strict=True):
        state = memory.advance(gates_now, state * keep_now)
        outputs.append(state[:, : memory.width])
    return torch.stack(outputs)


class MemoryLayout(ObsLayout):
    """An observation's arrays, and after them the state of the memory."""

    def __init__(self, obs: ObsLayout, n_state: int) -> None:
        super().__init__(obs.space)
        self.vector = self.only_vector
        self.specs = (*self.specs, ArraySpec((), "memory", (n_state,), np.dtype(np.float32)))
        self.only_vector = None


class RecurrentActorCritic(ActorCritic):
    """Policy and value network, each with a memory, or with a shared one.

    One step takes observations (B, …) that end with the state; `evaluate` takes sequences.
    """

    def __init__(
        self,
        obs: ObsLayout,
        action: ActionLayout,
        config: NetworkConfig,
        *,
        kind: str,
        width: int,
        normalize_obs: bool = False,
    ) -> None:
        super().__init__(obs, action, config, normalize_obs=normalize_obs)
        make, arch = MEMORIES[kind], config.network_arch
        vf_arch = arch if config.vf_arch is None else config.vf_arch
        self.pi_memory = make(self.pi_encoder.n_features, width)
        self.pi_body = mlp(width, arch, config.activation)
        if not arch:
            self.pi_out = linear(width, self.head.n_outputs, OUT_GAIN)
        if not self.shared:
            self.vf_memory = make(self.vf_encoder.n_features, width)
            self.vf_body = mlp(width, vf_arch, config.activation)
        if not vf_arch:
            self.vf_out = linear(width, 1, gain=1.0)
        self.state_size = self.pi_memory.n_state * (1 if self.shared else 2)
        self.obs = self.layout = MemoryLayout(obs, self.state_size)
        self.run_memory: Run = run_steps
        """Computes the outputs of sequences."""

    def memories(self) -> list[Memory]:
        """The policy's, and the value function's if it has its own."""
        return [self.pi_memory] if self.shared else [self.pi_memory, self.vf_memory]

    def pi_state(self, obs: Obs) -> Tensor:
        """The state of the policy's memory after this observation; what follows it in the last array is not read."""
        return self.pi_memory.step(
            self.pi_encoder(self._normalized(obs)), obs[-1][:, : self.pi_memory.n_state]
        )

    def _vf_state(self, obs: Obs) -> Tensor:
        if self.shared:
            return self.pi_state(obs)
        return self.vf_memory.step(
            self.vf_encoder(self._normalized(obs)), obs[-1][:, self.pi_memory.n_state :]
        )

    def features(self, obs: Obs) -> Tensor:
        """Inputs of the first hidden layer: the memory's output."""
        return self.pi_state(obs)[:, : self.pi_memory.width]

    def value(self, obs: Obs) -> Tensor:
        body = self.pi_body if self.shared else self.vf_body
        out: Tensor = self.vf_out(body(self._vf_state(obs)[:, : self.pi_memory.width]))
        return out.squeeze(-1)

    def act(self, obs: Obs, noise: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """Actions, sampled or without noise the most likely ones, their log-probabilities if sampled, the new states."""
        state = self.pi_state(obs)
        out, mask = self.pi_out(self.pi_body(state[:, : self.pi_memory.width])), self.mask(obs)
        if not self.shared:
            state = torch.cat([state, self._vf_state(obs)], 1)
        if noise is None:
            return self.head.mode(out, mask), None, state
        return *self.head.sample(out, noise, mask), state

    def evaluate(self, obs: Obs, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities, entropy and values (S, L) of sequences.

        `obs`: arrays (S, L, …), the states before the first steps, (S, n), and which steps go on with the state before.
        """
        *arrays, first, keep = obs
        n_steps, flat = keep.shape[1], [array.transpose(0, 1).flatten(0, 1) for array in arrays]
        inputs = self._normalized(flat)
        states, keep = first.split(self.pi_memory.n_state, 1), keep.t().float()

        def outputs(encoder: nn.Module, memory: Memory, state: Tensor) -> Tensor:
            gates = memory.gates_in(encoder(inputs)).unflatten(0, (n_steps, -1))
            return self.run_memory(memory, gates, state, keep).flatten(0, 1)

        hidden = features = self.pi_body(outputs(self.pi_encoder, self.pi_memory, states[0]))
        if not self.shared:
            hidden = self.vf_body(outputs(self.vf_encoder, self.vf_memory, states[1]))
        out, value = self.pi_out(features).float(), self.vf_out(hidden).float().squeeze(-1)
        found = self.head.evaluate(out, actions.transpose(0, 1).flatten(0, 1), self.mask(flat))
        by_step = [it.unflatten(0, (n_steps, -1)).t() for it in (*found, value)]
        return by_step[0], by_step[1], by_step[2]

    def own_actor(
        self, max_batch: int, device: torch.device, next_state: Array | None
    ) -> MemoryActor | MemoryKernelActor:
        """An actor that writes the new states to `next_state`."""
        if next_state is None:
            next_state = np.zeros((max_batch, self.state_size), np.float32)
        n_weights = sum(p.numel() for p in self.parameters())
        images = any(spec.kind == "image" for spec in self.obs.specs)
        if device.type == "cpu" and self.is_plain and not images and n_weights <= SMALL_MEMORY:
            return MemoryKernelActor(self, next_state)
        return MemoryActor(self, max_batch, device, next_state)


class MemoryActor(TorchActor):
    """The model itself, on its own device."""

    _model: RecurrentActorCritic

    def __init__(
        self, model: RecurrentActorCritic, max_batch: int, device: torch.device, next_state: Array
    ) -> None:
        super().__init__(model, max_batch, device)
        self._next_state = next_state

    def _act(self, obs: tuple[Tensor, ...], noise: Tensor) -> tuple[Tensor, Tensor]:
        action, log_prob, state = self._model.act(obs, noise)
        n = min(len(state), len(self._next_state))  # there are rows to fill up the last block
        torch.from_numpy(self._next_state[:n]).copy_(state[:n])
        assert log_prob is not None, "there is noise"
        return action, log_prob


class MemoryKernelActor(KernelActor):
    """Memories and MLP on the CPU as compiled functions."""

    _model: RecurrentActorCritic

    def __init__(self, model: RecurrentActorCritic, next_state: Array) -> None:
        from flatout.models import memory_kernel  # imports Numba, which takes a moment

        self._next_state, self._kernel = next_state, memory_kernel
        self._vector, self._memories = model.layout.vector, model.memories()
        self._weights = [memory_kernel.weights_of(memory) for memory in self._memories]
        self._scratch = [memory_kernel.scratch_for(memory) for memory in self._memories]
        super().__init__(model)

    def bind(self) -> None:
        super().bind()
        for memory, weights in zip(self._memories, self._weights, strict=True):
            self._kernel.copy_weights(memory, weights)

    @torch.inference_mode()
    def _features(self, obs: ObsArrays) -> Array:
        """The policy's output of its memory, after all memories have taken a step."""
        n, memory = len(obs[-1]), self._memories[0]
        step, new = self._kernel.STEPS[memory.n_gates], self._next_state[:n]
        for i, x in enumerate(self._inputs(obs)):
            step(x, obs[-1], i * memory.n_state, self._weights[i], self._scratch[i], new)
        features: Array = np.ascontiguousarray(new[:, : memory.width])
        return features

    def _inputs(self, obs: ObsArrays) -> list[Array]:
        """The input of each memory."""
        model, n = self._model, len(self._memories)
        if self._vector is not None and not model.normalizes:
            return [obs[self._vector].reshape(len(obs[-1]), -1)] * n
        tensors = model._normalized(tuple(torch.from_numpy(x) for x in obs))
        encoders = [model.pi_encoder, model.vf_encoder] if n > 1 else [model.pi_encoder]
        return [encoder(tensors).numpy() for encoder in encoders]


def build(
    obs: ObsLayout,
    action: ActionLayout,
    config: NetworkConfig,
    seed: int,
    *,
    kind: str,
    width: int,
    normalize_obs: bool = False,
) -> RecurrentActorCritic:
    """A recurrent actor-critic with initial parameters from the seed."""
    with seeded(seed):
        return RecurrentActorCritic(obs, action, config, kind=kind, width=width, normalize_obs=normalize_obs)
