"""The compiled backend: the whole update as a library, compiled by a child process while the run continues.

Libraries are cached between runs, under a key made of everything that their code depends on.
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
"""Compile where the remaining updates would take at least this long; compiling takes half a minute of a core."""
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
    """What the code of an update depends on, and how to make that update."""

    spec: MakesLearner
    device: str
    precision: str
    n_threads: int

    def key(self) -> str:
        """Changes with anything that the code depends on, flatout's own source included."""
        facts = self.spec.update_facts() | {
            "device": self.device,
            "precision": self.precision,
            "threads": self.n_threads,
            "torch": torch.__version__,
            "cpu": [platform.machine(), torch.backends.cpu.get_cpu_capability()],
            "source": _source_hash(),
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


def cached_path(recipe: Recipe) -> Path:
    """Where this update's library is cached, or would be."""
    return cache_folder() / "updates" / f"{recipe.key()}.so"


_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
"""PyTorch passes tensors to and from C in PyCapsules."""


def load(path: Path) -> Step:
    """A cached library as a step."""
    # Not by torch's own loader: it holds the GIL for the whole call, which would block a collector in this process.
    # ctypes releases it.
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
    """Trace and compile the step, and write the library to `path` atomically."""
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
    _remove_stale(path.parent)
    folder = Path(tempfile.mkdtemp(dir=path.parent))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = make_fx(flat_step)(*inputs)
            exported = torch.export.export(traced, inputs, strict=False)
            # Keep the compiler's working files out of the cache.
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "work"))
            torch._inductor.aoti_compile_and_package(exported, package_path=str(folder / "update.pt2"))
        os.replace(_library_in(folder / "update.pt2", folder), path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_stale(folder: Path) -> None:
    """Remove the files of compilers that were killed."""
    for left in folder.glob("tmp*"):
        with suppress(OSError):
            if time() - left.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)


def _library_in(package: Path, folder: Path) -> Path:
    """Extract the shared library of a package; it must be all that the step needs."""
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
    """Brings a compiled update into a run: a cached one at once, else a new one when it is ready and checked.

    `wait`: the run waits for it, so that every update is compiled.
    """

    def __init__(self, recipe: Recipe, *, wait: bool) -> None:
        self._recipe, self.wait, self._path = recipe, wait, cached_path(recipe)
        self._worker: CompilerProcess | None = None
        self._given_up = False
        self.only_cached = False
        """Use a cached update, but start no compilation: while a compiler runs nothing can be timed."""
        self.seconds = 0.0
        """How long the run waited for it."""
        self.notes: list[str] = []
        """Messages for the user, one line each."""

    def visit(self, update: Update[Any], batch: Any, *, seconds_left: float) -> None:
        """Switch `update` to the compiled backend if it is ready; called between rollouts.

        `seconds_left`: what the remaining updates would take without it.
        """
        if self._given_up:
            return
        began = perf_counter()
        try:
            if self._path.exists():
                self._take(update, batch)
            elif self.wait or (not self.only_cached and (self._worker or seconds_left > WORTH_SECONDS)):
                self._advance(update, batch)
        except Exception as error:
            self._give_up(str(error).split("\n")[0])
        if self.wait:
            self.seconds += perf_counter() - began

    def close(self) -> None:
        """End a compilation that is under way."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _advance(self, update: Update[Any], batch: Any) -> None:
        if self._worker is None:
            self._worker = CompilerProcess(self._recipe, self._path)
            if not self.wait:
                self.notes.append("compiling the update in the background")
        problem = self._worker.poll(MAX_SECONDS if self.wait else 0.0)
        if problem is None and not self.wait:
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


class CompilerProcess:
    """A compilation in a process of its own."""

    def __init__(self, recipe: Recipe, path: Path) -> None:
        self._path = path
        self._child = ChildProcess("flatout compiler", compiler_main, (recipe, str(path)), None)

    def poll(self, seconds: float = 0.0) -> str | None:
        """None while it compiles, "" when the library is there, else the reason why it failed."""
        try:
            if not self._child.connection.poll(seconds):
                return None
            answer = self._child.connection.recv_bytes()
        except (EOFError, OSError):
            answer = f"the compiler {self._child.cause_of_death()}".encode()
        self.close()
        return "" if answer == DONE else str(answer[1:], errors="replace").split("\n")[0] or "unknown"

    def close(self) -> None:
        """Stop it, finished or not."""
        self._child.kill()


def compiler_main(connection: Connection, recipe: Recipe, path: str) -> None:
    """Main function of the compiling process: makes an update like the run's own and compiles it."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    with suppress(ImportError):  # the tracer's progress bar would make a semaphore that a kill leaves behind
        import_module("tqdm").tqdm.set_lock(threading.RLock())
    torch.set_num_threads(recipe.n_threads)
    learner = recipe.spec.make_learner(recipe.device, recipe.precision)
    learner.update.begin(1e-4, 0.2)
    compile_to(Path(path), learner.update, learner.example_batch(learner.update.batch_size))
    connection.send_bytes(DONE)


def check_same(update: Update[Any], step: Step, batch: Any) -> None:
    """Raise where a compiled step computes something else for this minibatch than the update."""
    want = update.next_state(batch)
    got = step(*update.inputs(batch))
    for a, b in zip(got, want, strict=True):
        a, b = a.float(), b.float()
        limit = 1e-3 * b.abs().max().clamp(min=1e-3)
        if a.shape != b.shape or not bool(((a - b).abs() <= limit).all()):
            raise FlatoutError("the compiled update differs from the eager one; it is not used")


def _source_hash() -> str:
    """A hash of every file whose code a step is traced from."""
    root = Path(__file__).parent.parent
    files = sorted(p for room in ("algorithms", "learning", "models") for p in (root / room).rglob("*.py"))
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()
