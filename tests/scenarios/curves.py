"""What is watched while a scenario goes on, and printed as curves at its end."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

WIDTH = 60
BARS = " .:-=+*#%@"


class Curves:
    """Samples of named figures, taken each ``seconds`` until `stop`."""

    def __init__(self, figures: dict[str, Callable[[], float]], seconds: float = 1.0) -> None:
        self.samples: dict[str, list[float]] = {name: [] for name in figures}
        self.times: list[float] = []
        self._figures = figures
        self._seconds = seconds
        self._began = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(self._seconds):
            # Whatever is away for a moment leaves a gap.
            with suppress(Exception):
                found = {name: figure() for name, figure in self._figures.items()}
                self.times.append(time.monotonic() - self._began)
                for name, value in found.items():
                    self.samples[name].append(value)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(30)

    def most(self, name: str) -> float:
        return max(self.samples[name], default=0)

    def show(self) -> None:
        """Print each curve as one line of characters, its scale and its ends."""
        for name, values in self.samples.items():
            if values:
                print(f"{name:>24} |{_line(values)}| 0 to {max(values):g}, ends at {values[-1]:g}")
        if self.times:
            print(f"{'seconds':>24} |{'0':<{WIDTH - 6}}{self.times[-1]:>6.0f}|")

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({"seconds": self.times, **self.samples}))


def _line(values: list[float]) -> str:
    top = max(values) or 1
    line = []
    for column in range(WIDTH):
        first = column * len(values) // WIDTH
        last = max(first + 1, (column + 1) * len(values) // WIDTH)
        share = max(values[first:last]) / top
        line.append(BARS[min(len(BARS) - 1, round(share * (len(BARS) - 1)))])
    return "".join(line)
