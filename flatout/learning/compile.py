"""The whole update as compiled code, made by another process while this one learns on, and kept between runs.

Comes in: what an update is made of. Goes out: a library that computes the same step. The key under which it is kept
names everything that its code depends on, so an old one is never taken for a new one.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import shutil
import tempfile
import threading
import warnings
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter, time
from typing import Any, Generic, Protocol

import torch
from torch import Tensor

from flatout.device.machine import cache_folder
from flatout.errors import FlatoutError
from flatout.executors.workers import ChildProcess
from flatout.learning.learner import Learner
from flatout.learning.update import Batch, Step, Update

DONE = b"D"
WORTH_SECONDS = 90.0
"""A run whose updates would take this long without a compiled one gets it; compiling is half a minute of a core."""
MAX_SECONDS = 600.0
STALE_SECONDS = 3600.0


class MakesLearner(Protocol):
    """Makes learners like the run's own; picklable."""

    def make_learner(self, device: str, precision: str) -> Learner[Any]:
        """A new learner."""

    def update_facts(self) -> dict[str, Any]:
        """Everything that the code of its update depends on, as JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What an update's code depends on."""

    spec: MakesLearner
    device: str
    precision: str
    n_threads: int

    def key(self) -> str:
        """A name that changes with anything the code depends on, our own source included."""
        facts = self.spec.update_facts() | {
            "device": self.device,
            "precision": self.precision,
            "threads": self.n_threads,
            "torch": torch.__version__,
            "cpu": [platform.machine(), torch.backends.cpu.get_cpu_capability()],
            "source": _source_hash(),
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


def kept(recipe: Recipe) -> Path:
    """Where this update's library is, or would be."""
    return cache_folder() / "updates" / f"{recipe.key()}.so"


_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
"""How torch hands tensors to C and takes them back."""


def load(path: Path) -> Step:
    """A kept library as a step."""
    # Not through torch's own loader: that keeps Python's lock for the whole call, and whoever collects meanwhile
    # in this process stands still. ctypes lets go of it.
    library = ctypes.CDLL(str(path))
    container, n_outputs = ctypes.c_void_p(), ctypes.c_size_t()
    create, count = (
        library.AOTInductorModelContainerCreateWithDevice,
        library.AOTInductorModelContainerGetNumOutputs,
    )
    if create(ctypes.byref(container), ctypes.c_size_t(1), b"cpu", None) or count(
        container, ctypes.byref(n_outputs)
    ):
        raise FlatoutError("the compiled update cannot be loaded")
    run, n_out = library.AOTInductorModelContainerRun, n_outputs.value
    Outputs = ctypes.c_void_p * n_out
    own, give_back = (
        torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors,
        torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs,
    )

    def step(
        state: Sequence[Tensor],
        settings: Sequence[Tensor],
        buffers: Sequence[Tensor],
        batch: Sequence[Tensor],
    ) -> Sequence[Tensor]:
        handles = [_pointer(capsule, None) for capsule in own([*state, *settings, *buffers, *batch])]
        n, outputs = len(handles), Outputs()
        inputs = (ctypes.c_void_p * n)(*handles)
        if run(container, inputs, ctypes.c_size_t(n), outputs, ctypes.c_size_t(n_out), None, None):
            message = ctypes.c_char_p()
            library.AOTInductorGetLastError(ctypes.byref(message))
            raise RuntimeError((message.value or b"the compiled update failed").decode(errors="replace"))
        new: Sequence[Tensor] = give_back([_capsule(pointer, None, None) for pointer in outputs])
        return new

    return step


def compile_to(path: Path, update: Update[Any], batch: Any) -> None:
    """Trace the step, compile it, and keep it under `path`, whole or not at all."""
    from torch.fx.experimental.proxy_tensor import make_fx

    groups = [[tensor.detach().clone() for tensor in group] for group in update.inputs(batch)]
    sizes = [len(group) for group in groups]
    pure = update.pure(batch)

    def flat_step(*tensors: Tensor) -> Sequence[Tensor]:
        left = list(tensors)
        parts = [[left.pop(0) for _ in range(size)] for size in sizes]
        return pure(*parts)

    inputs = tuple(tensor for group in groups for tensor in group)
    path.parent.mkdir(parents=True, exist_ok=True)
    _clear_away(path.parent)
    folder = Path(tempfile.mkdtemp(dir=path.parent))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = make_fx(flat_step)(*inputs)
            exported = torch.export.export(traced, inputs, strict=False)
            # Only the step itself is wanted on disk, not the compiler's working files.
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "work"))
            torch._inductor.aoti_compile_and_package(exported, package_path=str(folder / "update.pt2"))
        os.replace(_library_in(folder / "update.pt2", folder), path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _clear_away(folder: Path) -> None:
    """Remove what compilers left behind that were killed."""
    for left in folder.glob("tmp*"):
        with suppress(OSError):
            if time() - left.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)


def _library_in(package: Path, folder: Path) -> Path:
    """The shared library of a package, taken out of it; it must be all that the step needs."""
    with zipfile.ZipFile(package) as archive:
        names = archive.namelist()
        (library,) = (name for name in names if name.endswith(".so"))
        if any(name.endswith((".json", ".blob", ".bin")) and "_metadata" not in name for name in names):
            raise FlatoutError("the compiled update needs more than its library")
        return Path(archive.extract(library, folder))


class CompiledBackend(Generic[Batch]):
    """An update's step as compiled code."""

    name = "compiled"

    def __init__(self, update: Update[Batch], step: Step) -> None:
        self._update, self._step = update, step

    def step(self, batch: Batch) -> None:
        """Learn from one minibatch."""
        self._update.commit(self._step(*self._update.inputs(batch)))


class Compilation:
    """Brings a compiled update into a run: a kept one at once, else a new one when it is ready and found the same.

    `wait`: let the run wait for it, so that every update is the compiled one.
    """

    def __init__(self, recipe: Recipe, *, wait: bool) -> None:
        self._recipe, self._wait, self._path = recipe, wait, kept(recipe)
        self._worker: Background | None = None
        self._given_up = False
        self.only_kept = False
        """Take a compiled update if one is kept, but begin none: while a compiler runs nothing can be timed."""
        self.seconds = 0.0
        """How long the run waited for it."""
        self.notes: list[str] = []
        """What a user should know, one line each."""

    def visit(self, update: Update[Any], batch: Any, *, seconds_left: float) -> None:
        """Give `update` its compiled step if there is one by now; called between rollouts.

        `seconds_left`: what the updates still to come would take without one.
        """
        if self._given_up:
            return
        began = perf_counter()
        try:
            if self._path.exists():
                self._take(update, batch)
            elif self._wait or (not self.only_kept and (self._worker or seconds_left > WORTH_SECONDS)):
                self._advance(update, batch)
        except Exception as error:
            self._give_up(str(error).split("\n")[0])
        if self._wait:
            self.seconds += perf_counter() - began

    def close(self) -> None:
        """End a compilation that is under way."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _advance(self, update: Update[Any], batch: Any) -> None:
        if self._worker is None:
            self._worker = Background(self._recipe, self._path)
            if not self._wait:
                self.notes.append("compiling the update in the background")
        problem = self._worker.poll(MAX_SECONDS if self._wait else 0.0)
        if problem is None and not self._wait:
            return
        self.close()
        if problem:
            self._give_up(problem)
        elif problem is None:
            self._give_up(f"the compiler took more than {MAX_SECONDS:.0f} s")
        else:
            self._take(update, batch)

    def _take(self, update: Update[Any], batch: Any) -> None:
        self.close()
        step = load(self._path)
        check_same(update, step, batch)
        update.use(CompiledBackend(update, step))
        self.notes.append("the update is compiled from here on")

    def _give_up(self, why: str) -> None:
        self._given_up = True
        self.close()
        self.notes.append(f"learning without a compiled update: {why}")


class Background:
    """A compilation in a process of its own."""

    def __init__(self, recipe: Recipe, path: Path) -> None:
        self._path = path
        self._child = ChildProcess("flatout compiler", compiler_main, (recipe, str(path)), None)

    def poll(self, seconds: float = 0.0) -> str | None:
        """None while it works, "" when the library is there, else why there will be none."""
        try:
            if not self._child.connection.poll(seconds):
                return None
            answer = self._child.connection.recv_bytes()
        except (EOFError, OSError):
            answer = f"the compiler {self._child.cause_of_death()}".encode()
        self.close()
        return "" if answer == DONE else str(answer[1:], errors="replace").split("\n")[0] or "unknown"

    def close(self) -> None:
        """End it, finished or not."""
        self._child.kill()


def compiler_main(connection: Connection, recipe: Recipe, path: str) -> None:
    """The compiling process: builds an update like the run's own, on the same kind of device, and compiles it."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    with suppress(
        ImportError
    ):  # the tracer shows no progress, but would make a semaphore that a kill leaves behind
        import_module("tqdm").tqdm.set_lock(threading.RLock())
    torch.set_num_threads(recipe.n_threads)
    learner = recipe.spec.make_learner(recipe.device, recipe.precision)
    learner.update.begin(1e-4, 0.2)
    compile_to(Path(path), learner.update, learner.example_batch(learner.update.batch_size))
    connection.send_bytes(DONE)


def check_same(update: Update[Any], step: Step, batch: Any) -> None:
    """Raise where a compiled step does not do to this minibatch what the update itself does."""
    want = update.next_state(batch)
    got = step(*update.inputs(batch))
    for a, b in zip(got, want, strict=True):
        a, b = a.float(), b.float()
        limit = 1e-3 * b.abs().max().clamp(min=1e-3)
        if a.shape != b.shape or not bool(((a - b).abs() <= limit).all()):
            raise FlatoutError("the compiled update does not compute what the update does; it is not used")


def _source_hash() -> str:
    """Of every file whose code a step is traced from."""
    root = Path(__file__).parent.parent
    files = sorted(p for room in ("algorithms", "learning", "models") for p in (root / room).rglob("*.py"))
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()
