"""The compiled backend: the whole update as a library, compiled by a child process while the run continues.

Libraries are cached between runs, under a key made of everything that their code depends on. A library ends in its own
SHA-256, which a loader of shared libraries ignores: one that is cut or damaged is compiled again, not loaded.
"""

from __future__ import annotations

import ctypes
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
from hashlib import sha256
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter, time
from typing import Any, Generic, Protocol

import torch
from torch import Tensor

from flatout.device.machine import cache_folder
from flatout.device.private import find, notes
from flatout.errors import FlatoutError
from flatout.executors.workers import ChildProcess
from flatout.learning.learner import Learner
from flatout.learning.update import Batch, Step, Update

DONE = b"D"
WORTH_SECONDS = 90.0
"""Compile where the remaining updates would take at least this long; compiling takes half a minute of a core."""
MAX_SECONDS = 600.0
STALE_SECONDS = 3600.0
N_HASH = 32
PASSING = (
    "torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors",
    "torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs",
)


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
        return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


def cached_path(recipe: Recipe) -> Path:
    """Where this update's library is cached, or would be."""
    return cache_folder() / "updates" / f"{recipe.key()}.so"


def is_cached(path: Path) -> bool:
    """Whether a library is there and whole; a damaged one is removed."""
    try:
        _require_own(path.parent)
        data = path.read_bytes()
    except FileNotFoundError:
        return False
    if sha256(data[:-N_HASH]).digest() == data[-N_HASH:]:
        return True
    path.unlink(missing_ok=True)
    return False


def _require_own(folder: Path) -> None:
    """Refuse a folder in which others could put code that this process would run."""
    status = folder.stat()
    if hasattr(os, "geteuid") and (status.st_uid != os.geteuid() or status.st_mode & 0o022):
        raise FlatoutError(f"others can write to {folder}; remove it, or set FLATOUT_CACHE to another folder")


_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
"""PyTorch passes tensors to and from C in PyCapsules."""


def is_available() -> bool:
    """Whether this PyTorch can pass tensors to a library."""
    return None not in map(find, PASSING)


def load(path: Path) -> Step:
    """A cached library as a step."""
    # Not by torch's own loader: it holds the GIL for the whole call, which would block a collector in this process.
    # ctypes releases it.
    library = ctypes.CDLL(str(path))
    container, n_outputs = ctypes.c_void_p(), ctypes.c_size_t()
    create = library.AOTInductorModelContainerCreateWithDevice
    count = library.AOTInductorModelContainerGetNumOutputs
    run = library.AOTInductorModelContainerRun
    failed = create(ctypes.byref(container), ctypes.c_size_t(1), b"cpu", None)
    if failed or count(container, ctypes.byref(n_outputs)):
        raise FlatoutError("the compiled update cannot be loaded")
    n_out = n_outputs.value
    Outputs = ctypes.c_void_p * n_out
    own, give_back = map(find, PASSING)

    def step(*groups: Sequence[Tensor]) -> Sequence[Tensor]:
        tensors = [tensor for group in groups for tensor in group]
        handles = [_pointer(capsule, None) for capsule in own(tensors)]
        n, outputs = len(handles), Outputs()
        inputs = (ctypes.c_void_p * n)(*handles)
        if run(container, inputs, ctypes.c_size_t(n), outputs, ctypes.c_size_t(n_out), None, None):
            message = ctypes.c_char_p()
            library.AOTInductorGetLastError(ctypes.byref(message))
            raise RuntimeError((message.value or b"the compiled update failed").decode(errors="replace"))
        new: Sequence[Tensor] = give_back([_capsule(pointer, None, None) for pointer in outputs])
        return new

    return step


def _traced(update: Update[Any], batch: Any) -> tuple[Any, tuple[Tensor, ...]]:
    """The step as a graph of operations, and inputs for it."""
    make_fx = find("torch.fx.experimental.proxy_tensor.make_fx")
    if make_fx is None:
        raise FlatoutError(notes[-1])
    groups, pure = update.inputs(batch), update.pure(batch)
    inputs = tuple(tensor.detach().clone() for group in groups for tensor in group)

    def flat_step(*tensors: Tensor) -> Sequence[Tensor]:
        left = iter(tensors)
        return pure(*([next(left) for _ in group] for group in groups))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make_fx(flat_step)(*inputs), inputs


def compiled_here(update: Update[Any], batch: Any) -> Step:
    """The step compiled in this process, to be captured in a graph."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled: Any = torch.compile(_traced(update, batch)[0], dynamic=False)

        def step(*groups: Sequence[Tensor]) -> Sequence[Tensor]:
            with torch.no_grad():
                new: Sequence[Tensor] = compiled(*(tensor for group in groups for tensor in group))
            return new

        check_same(update, step, batch)
    return step


def compile_to(path: Path, update: Update[Any], batch: Any) -> None:
    """Trace and compile the step, and write the library to `path` atomically."""
    aoti_compile = find("torch._inductor.aoti_compile_and_package")
    if aoti_compile is None:
        raise FlatoutError(notes[-1])
    traced, inputs = _traced(update, batch)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for left in path.parent.glob("tmp*"):  # of compilers that were killed
        with suppress(OSError):
            if time() - left.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(dir=path.parent))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.export.export(traced, inputs, strict=False)
            # Keep the compiler's working files out of the cache.
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "work"))
            aoti_compile(exported, package_path=str(folder / "update.pt2"))
        library = _library_in(folder / "update.pt2")
        (folder / "library").write_bytes(library + sha256(library).digest())
        os.replace(folder / "library", path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _library_in(package: Path) -> bytes:
    """The shared library of a package; it must be all that the step needs."""
    with zipfile.ZipFile(package) as archive:
        names = archive.namelist()
        (library,) = (name for name in names if name.endswith(".so"))
        if any(name.endswith((".json", ".blob", ".bin")) and "_metadata" not in name for name in names):
            raise FlatoutError("the compiled update needs more than its library")
        return archive.read(library)


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
        self._compiler: ChildProcess | None = None
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
            if is_cached(self._path):
                self._take(update, batch)
            elif self.wait or (not self.only_cached and (self._compiler or seconds_left > WORTH_SECONDS)):
                self._advance(update, batch)
        except Exception as error:
            self._give_up(str(error).split("\n")[0])
        if self.wait:
            self.seconds += perf_counter() - began

    def close(self) -> None:
        """End a compilation that is under way."""
        if self._compiler is not None:
            self._compiler.kill()
            self._compiler = None

    def _advance(self, update: Update[Any], batch: Any) -> None:
        """Start the compiler, or take what it has finished."""
        if self._compiler is None:
            arguments = self._recipe, str(self._path)
            self._compiler = ChildProcess("flatout compiler", compiler_main, arguments)
            if not self.wait:
                self.notes.append("compiling the update in the background")
        try:
            if self._compiler.connection.poll(MAX_SECONDS if self.wait else 0.0):
                answer = self._compiler.connection.recv_bytes()
            elif self.wait:
                raise FlatoutError(f"the compiler took more than {MAX_SECONDS:.0f} s")
            else:
                return
        except (EOFError, OSError):
            raise FlatoutError(f"the compiler {self._compiler.cause_of_death()}") from None
        if answer != DONE:
            raise FlatoutError(str(answer[1:], errors="replace") or "unknown")
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
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
