"""The machine as lines of gauges: cores, memory, GPUs.

In: a Moment and a width. Out: styled text; a GPU is shown only as far as its driver told.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from flatout.runlog.lines import number
from flatout.views.figures import percent, share_done
from flatout.views.monitor import Moment
from flatout.views.view import bar, fitting

_LABEL_CELLS = 9
_LEVELS = "▁▂▃▄▅▆▇█"


def gauges(moment: Moment, width: int) -> list[Text]:
    """The machine in a few lines."""
    share = share_done(moment.memory, moment.memory_total)
    used = f"{_gigabytes(moment.memory)} of {_gigabytes(moment.memory_total)} ({percent(share)})"
    return [
        *_cores(moment.cores, width),
        _gauge("memory", share, Text(used), width),
        *([Text(moment.no_gpu, "dim", no_wrap=True, overflow="ellipsis")] if moment.no_gpu else []),
        *(line for device, gpu in moment.gpus.items() for line in _gpu(device, gpu, width)),
    ]


def _cores(loads: list[float], width: int) -> list[Text]:
    """A bar for each core or, where there are many, a block of its height."""
    per_line = max(1, (width - _LABEL_CELLS) // 22)
    if len(loads) > 2 * per_line:
        mean = f" {percent(sum(loads) / len(loads))}"
        blocks = "".join(_LEVELS[round(7 * share_done(load, 1.0))] for load in loads)
        room = max(1, width - _LABEL_CELLS - len(mean))
        parts = [blocks[i : i + room] for i in range(0, len(blocks), room)]
        parts[-1] += mean
        return [_labelled("cores" if i == 0 else "", Text(part)) for i, part in enumerate(parts)]
    n_lines = -(-len(loads) // per_line)
    per_line = -(-len(loads) // max(1, n_lines))
    room = (width - _LABEL_CELLS) // max(1, per_line)
    bars = [Text.assemble(bar(min(load, 1.0), room - 8), f" {percent(load):<7}") for load in loads]
    starts = range(0, len(bars), per_line)
    return [_labelled("cores" if i == 0 else "", Text().join(bars[i : i + per_line])) for i in starts]


def _gpu(device: str, gpu: Mapping[str, Any], width: int) -> list[Text]:
    """What the card told last; what it does not tell is left out."""
    known = {name: value for name in gpu if (value := number(gpu[name])) is not None}
    memory, total, load = known.get("memory"), known.get("memory_total"), known.get("utilization")
    figures = []
    if load is not None:
        # Not plain "busy": the driver counts any kernel, however little of the card it fills.
        figures.append(Text(f"{percent(load)} of time in kernels"))
    if memory is not None:
        figures.append(Text(_gigabytes(memory) + (f" of {_gigabytes(total)}" if total else "")))
    for name, unit in (("power", "W"), ("temperature", "°C")):
        if name in known:
            figures.append(Text(f"{known[name]:.0f} {unit}"))
    shown = Text("  ").join(fitting(figures, width - _LABEL_CELLS - 6, "  "))
    line = _labelled(device, shown) if load is None else _gauge(device, load, shown, width)
    reasons = gpu.get("throttled")
    if not isinstance(reasons, list) or not reasons:
        return [line]
    return [line, _labelled("", Text(f"slowed by {', '.join(map(str, reasons))}", "bold red"))]


def _gauge(label: str, share: float, text: Text, width: int) -> Text:
    room = max(4, min(width // 2, width - _LABEL_CELLS - text.cell_len - 2))
    return _labelled(label, Text.assemble(bar(share_done(share, 1.0), room), "  ", text))


def _labelled(label: str, text: Text) -> Text:
    return Text.assemble((f"{label:<{_LABEL_CELLS}}", "dim"), text, no_wrap=True, overflow="crop")


def _gigabytes(n_bytes: float) -> str:
    return f"{n_bytes / 2**30:.1f} GB"
