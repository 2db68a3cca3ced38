"""Accelerators: the only file that knows what kinds of them there are.

Everything here is written for `torch.accelerator`, so CUDA, ROCm (`cuda` in torch), XPU and MPS are devices alike, and so
is any other backend that torch knows. What a kind cannot do is asked here: `has_streams`, `can_capture`, `choose_precision`.
Torch is imported inside functions, so that a command line parses without it.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

from flatout.errors import FlatoutError, did_you_mean

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
KINDS = ("cuda", "xpu", "mps")
"""The kinds of accelerators that users name."""
_MEANT = {"gpu": "cuda", "nvidia": "cuda", "rocm": "cuda", "hip": "cuda", "intel": "xpu", "metal": "mps"}
ALIGNMENT = 64
"""Bytes; where arrays begin that are copied together."""
WARM_UPS = 2
"""Runs before a graph is captured."""
LARGE_NETWORK = 1_000_000
"""Parameters from which 16-bit forward passes are worth the conversions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One accelerator."""

    name: str
    """The driver's name, such as `NVIDIA GeForce RTX 4070`."""
    memory_bytes: int
    """0: not known."""
    compute_capability: str
    """For CUDA, such as `8.9`; decides which number formats the device supports. Else empty."""
    kind: str = "cuda"
    """Torch's name of its kind."""


def is_accelerator(device: torch.device) -> bool:
    """Whether a device is anything but the host's processor."""
    return device.type not in ("cpu", "meta")


def accelerators() -> list[Gpu]:
    """The accelerators that torch can use, in its order; empty without a build or a driver for them."""
    import torch

    current = torch.accelerator.current_accelerator(check_available=True)
    if current is None:
        return []
    return [_describe(torch.device(current.type, i)) for i in range(torch.accelerator.device_count())]


def _describe(device: torch.device) -> Gpu:
    import torch

    module: Any = getattr(torch, device.type, None)
    properties: Any = None
    if hasattr(module, "get_device_properties"):
        properties = module.get_device_properties(device)
    capability = f"{properties.major}.{properties.minor}" if device.type == "cuda" else ""
    return Gpu(
        name=getattr(properties, "name", device.type),
        memory_bytes=getattr(properties, "total_memory", 0) or _total_memory(device),
        compute_capability=capability,
        kind=device.type,
    )


def _total_memory(device: torch.device) -> int:
    import torch

    try:
        return int(torch.accelerator.get_memory_info(device)[1])
    except (RuntimeError, NotImplementedError):
        return 0


def resolve_device(text: str, gpus: Sequence[Gpu] | None = None) -> str:
    """Turn `auto`, `cpu`, `cuda`, `cuda:N`, `xpu:N`, `mps` into a device that exists; `gpus` defaults to torch's.

    With its index: torch takes a name without one for whatever device is the current one of the thread.
    """
    name = text.strip().lower()
    if name == "cpu":
        return name
    if gpus is None:
        gpus = accelerators()
    there = gpus[0].kind if gpus else ""
    named = re.fullmatch(r"([a-z]+)(?::(\d+))?", name)
    if name == "auto":
        return _with_index(there, "0") if there else "cpu"
    if named is None or named[1] not in (*KINDS, there):
        raise FlatoutError(
            f"--device {text!r}: no such device{_hint(name)} (auto, cpu, cuda or cuda:N, xpu or xpu:N, mps)"
        )
    kind, index = named[1], named[2]
    if kind != there:
        raise FlatoutError(f"--device {name}: no {kind.upper()} device found; {_torch_build(there)}")
    if index is not None and int(index) >= len(gpus):
        found = ", ".join(f"{kind}:{nth} ({gpu.name})" for nth, gpu in enumerate(gpus))
        raise FlatoutError(f"--device {name}: this machine has {found}")
    return _with_index(kind, index or "0")


def _with_index(kind: str, index: str) -> str:
    return kind if kind == "mps" else f"{kind}:{index}"


def _hint(name: str) -> str:
    kind = name.rstrip("0123456789")
    if kind in (*_MEANT, *KINDS):
        meant, index = _MEANT.get(kind, kind), name[len(kind) :]
        return f"; did you mean {meant + (':' + index if index else '')!r}?"
    return did_you_mean(name, ("auto", "cpu", *KINDS))


def _torch_build(there: str) -> str:
    import torch

    if there:
        return f"this machine has {there}; use --device {there}"
    if torch.version.cuda is None:
        return f"this torch build ({torch.__version__}) has no CUDA; use --device cpu"
    return f"this torch build ({torch.__version__}, CUDA {torch.version.cuda}) sees no usable driver; use --device cpu"


def use_device(device: torch.device) -> None:
    """Make `device` the current one of this thread; every thread that launches work begins with this."""
    import torch

    if has_streams(device):
        torch.accelerator.set_device_index(device.index or 0)


def has_streams(device: torch.device) -> bool:
    """Whether work and copies can be put into several streams, with copies from and to pinned memory."""
    return is_accelerator(device) and device.type != "mps"


def can_capture(device: torch.device) -> bool:
    """Whether launches can be captured as a graph."""
    return has_streams(device)


def no_compiler(device: torch.device) -> str:
    """Why code cannot be compiled for an accelerator, in a few words; empty if it can."""
    if device.type not in ("cuda", "xpu"):
        return f"there is no compiler for {device.type}"
    return "" if find_spec("triton") else "Triton is not installed"


def new_stream(device: torch.device, *, urgent: bool = False) -> torch.Stream:
    """A stream; the device runs the kernels of an urgent one before those that wait in others."""
    import torch

    return torch.Stream(device, priority=-1 if urgent else 0)


def current_stream(device: torch.device) -> torch.Stream:
    """The stream that this thread launches into."""
    import torch

    return torch.accelerator.current_stream(device)


def new_event(device: torch.device, *, timed: bool = False) -> torch.Event:
    """An event to be recorded in a stream."""
    import torch

    return torch.Event(device, enable_timing=timed)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all its work; nothing on the CPU. For timing."""
    import torch

    if is_accelerator(device):
        torch.accelerator.synchronize(device)


class Packed:
    """Several arrays side by side in one block of pinned memory, and the same block on a device: one copy moves all."""

    def __init__(self, like: Sequence[Any], device: torch.device) -> None:
        import torch

        starts = list(accumulate((-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in like), initial=0))
        self._pinned = torch.zeros(starts[-1], dtype=torch.uint8, pin_memory=True)
        self._there = torch.zeros(starts[-1], dtype=torch.uint8, device=device)

        def part(block: torch.Tensor, start: int, array: Any) -> torch.Tensor:
            dtype = torch.from_numpy(array.reshape(-1)[:0]).dtype
            return block[start : start + array.nbytes].view(dtype).view(array.shape)

        parts = list(zip(starts, like, strict=False))
        self.arrays: list[Any] = [part(self._pinned, *it).numpy() for it in parts]
        """In pinned memory."""
        self.tensors: list[torch.Tensor] = [part(self._there, *it) for it in parts]
        """On the device."""

    def to_device(self) -> list[torch.Tensor]:
        """Copy them to the device; returns them there."""
        self._there.copy_(self._pinned, non_blocking=True)
        return self.tensors

    def to_host(self, values: Sequence[torch.Tensor]) -> None:
        """Write values on the device, and copy them to the host."""
        for tensor, value in zip(self.tensors, values, strict=True):
            tensor.copy_(value)
        self._pinned.copy_(self._there, non_blocking=True)


def send(values: Any, device: torch.device) -> torch.Tensor:
    """An array or a tensor on a device; the host does not wait for the copy."""
    import torch

    return pinned(torch.as_tensor(values), device).to(device, non_blocking=True)


def pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor in memory that is copied to a device without waiting."""
    return tensor.pin_memory() if has_streams(device) and tensor.device.type == "cpu" else tensor


class Graph:
    """Launches that were captured once; `replay` launches all of them at once, on the same memory.

    `warm_up` runs before, on the stream of the capture: libraries may initialize themselves then, not later. A capture
    records `work` and does not run it. Other threads may use the device meanwhile. What `work` reads must stay where it is.
    """

    def __init__(
        self, work: Callable[[], Any], device: torch.device, warm_up: Callable[[], Any] = lambda: None
    ) -> None:
        import torch

        stream, now = new_stream(device), current_stream(device)
        stream.wait_stream(now)
        self._graph = torch.accelerator.Graph(capture_error_mode="thread_local")
        try:
            with stream:
                for _ in range(WARM_UPS):
                    warm_up()
                self._capture(work)
        finally:  # also if it failed: what was launched still reads memory of the current stream
            now.wait_stream(stream)

    def _capture(self, work: Callable[[], Any]) -> None:
        # Not `with graph`: that would empty the caches of other threads too.
        self._graph.capture_begin()
        try:
            work()
        except BaseException:
            with suppress(RuntimeError):  # the capture is invalid anyway
                self._graph.capture_end()
            raise
        self._graph.capture_end()

    def replay(self) -> None:
        """Launch everything, in the current stream."""
        self._graph.replay()


def free_device_memory(device: torch.device) -> int:
    """Free bytes on an accelerator."""
    import torch

    return int(torch.accelerator.get_memory_info(device)[0])


def device_memory_share(device: torch.device) -> float | None:
    """Share of an accelerator's memory that is in use, by all processes; None: not known."""
    import torch

    try:
        free, total = torch.accelerator.get_memory_info(device)
    except (RuntimeError, NotImplementedError):
        return None
    return 1 - free / total if total else None


def release_memory(device: torch.device) -> None:
    """Give back memory that is cached but not used."""
    import torch

    gc.unfreeze()  # agents of earlier runs may be among what a run has frozen
    gc.collect()
    if has_streams(device):
        torch.accelerator.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or its cause, means that the memory of the device or the host is exhausted."""
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, RuntimeError) and "not enough memory" in str(error):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


class Retries:
    """Repeats work that has run out of memory, after giving back memory that is cached but not used."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.notes: list[str] = []
        """One line for each time memory ran out; taken by those who tell the user."""
        self.n_backoffs = 0

    def attempt(self, work: Callable[[], T]) -> T:
        """What `work` returns; it leaves no trace when it fails."""
        try:
            return work()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason = short_reason(error)
        # Outside the except block, so that the tensors that the traceback held are freed.
        self.n_backoffs += 1
        self.notes.append(f"out of memory; cached memory is given back, same result ({reason})")
        release_memory(self._device)
        return work()


def short_reason(error: BaseException) -> str:
    """The first sentence of an error."""
    return str(error).split("\n")[0].split(". ")[0]


def choose_precision(wanted: str, device: torch.device, n_params: int) -> str:
    """The number format of updates for `--precision wanted`; raises if the device does not support it.

    fp32: plain. tf32: matrix products round their inputs to 10 bits. bf16 and fp16: forward passes in 16 bits,
    parameters and gradients in 32; fp16 scales the loss, because its range is small.
    """
    capability = _compute_capability(device)
    if capability is not None:
        return precision_for_capability(wanted, capability, n_params)
    if wanted in ("tf32", "fp16"):
        raise FlatoutError(
            f"--precision {wanted} is for CUDA devices, this is {device.type}; use fp32 or bf16"
        )
    return "fp32" if wanted == "auto" else wanted


def _compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Of a device that has one as NVIDIA's have."""
    import torch

    ask = getattr(torch.get_device_module(device), "get_device_capability", None)
    if ask is None or torch.version.hip is not None:
        return None
    capability = ask(device)
    return capability if isinstance(capability, tuple) and capability[0] > 0 else None


def precision_for_capability(wanted: str, capability: tuple[int, int], n_params: int) -> str:
    """The number format for a CUDA device of this compute capability."""
    major, minor = capability
    if wanted in ("tf32", "bf16") and major < 8:
        raise FlatoutError(
            f"--precision {wanted} needs compute capability 8.0, this device has {major}.{minor}"
        )
    if wanted != "auto":
        return wanted
    if n_params >= LARGE_NETWORK and major >= 7:
        return "bf16" if major >= 8 else "fp16"
    return "tf32" if major >= 8 else "fp32"


def use_matmul_precision(precision: str) -> None:
    """Allow TF32 in float32 matrix products and convolutions for tf32 and bf16, forbid it otherwise."""
    import torch

    allowed = precision in ("tf32", "bf16")
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed
