"""`torch.sim`: what torch asks of the module of a device type."""

from __future__ import annotations

import types

import torch

extension = types.ModuleType("not built yet")
"""the built extension; `simcard.install` puts it here"""
capability = (0, 0)
"""NVIDIA's compute capability of the card that is timed"""


def is_available() -> bool:
    """Whether there is a device."""
    return device_count() > 0


def is_initialized() -> bool:
    """The card needs no start-up."""
    return True


def device_count() -> int:
    """How many devices there are."""
    return int(extension.device_count())


def current_device() -> int:
    """The device of this thread."""
    return torch.accelerator.current_device_index()


def set_device(device: int) -> None:
    """Sets the device of this thread."""
    torch.accelerator.set_device_index(device)


class device(torch.accelerator.device_index):  # named as torch.cuda's
    """Within: another device for this thread."""

    def __init__(self, device: int | str | torch.device) -> None:
        super().__init__(_index(device))


def get_device_name(device: int = 0) -> str:
    """The name of a device."""
    return f"simulated card {device}"


def get_device_capability(device: torch.device | str | int | None = None) -> tuple[int, int]:  # noqa: ARG001
    """The card's in timed mode; none in exact mode, where numbers are the CPU's."""
    return capability


def synchronize(device: torch.device | str | int | None = None) -> None:
    """Waits for all work of a device."""
    torch.accelerator.synchronize(device)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """What autocast can use."""
    return [torch.bfloat16, torch.float16]


def _is_in_bad_fork() -> bool:
    return bool(extension.forked())


def manual_seed(seed: int) -> None:
    """Seeds the generator of this thread's device."""
    _generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seeds the generators of all devices."""
    for device in range(device_count()):
        _generator(device).manual_seed(seed)


def get_rng_state(device: int | str | torch.device = "sim") -> torch.Tensor:
    """The state of a device's generator."""
    return _generator(_index(device)).get_state()


def set_rng_state(state: torch.Tensor, device: int | str | torch.device = "sim") -> None:
    """Sets the state of a device's generator."""
    _generator(_index(device)).set_state(state)


def host_register(address: int, nbytes: int) -> None:
    """Host memory of somebody else counts as pinned from now on."""
    extension.register_pinned(address, nbytes)


def host_unregister(address: int) -> None:
    """Takes `host_register` back."""
    extension.unregister_pinned(address)


def _index(device: int | str | torch.device) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index


def _generator(device: int) -> torch.Generator:
    return default_generators()[device]


def default_generators() -> list[torch.Generator]:
    """The default generators of all devices."""
    return [extension.default_generator(device) for device in range(device_count())]
