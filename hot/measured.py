"""What was measured on devices, as data: a CSV file for each device, packaged with HOT or this user's own."""

from __future__ import annotations

import csv
import io
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from hot.errors import HotError
from hot.files import cache_folder, slug, write_whole
from hot.policies.presets import preset_folder

T = TypeVar("T")


@dataclass(frozen=True)
class Measured(Generic[T]):
    """The files of one kind. folder: their folder's name, in configs and in the cache; record: makes a line of its values.

    columns: by name, in the order of the record's fields, what converts a text, what tells a right value, and what such a one
    is; command: what measures anew.
    """

    folder: str
    record: Callable[..., T]
    columns: Mapping[str, tuple[Callable[[str], Any], Callable[[Any], object], str]]
    command: str

    def packaged(self, device_name: str) -> Path:
        """Where the file of a device is that comes with HOT, if there is one."""
        return preset_folder().parent / self.folder / f"{slug(device_name)}.csv"

    def own(self, device_name: str) -> Path:
        """Where this user's file of a device is, if there is one."""
        return self.user_folder() / f"{slug(device_name)}.csv"

    def user_folder(self) -> Path:
        """Where this user's files are."""
        return cache_folder() / self.folder

    def files(self) -> list[Path]:
        """All that there are, the packaged ones first."""
        return [path for of in (self.packaged("").parent, self.user_folder()) for path in sorted(of.glob("*.csv"))]

    def read(self, path: Path) -> list[T]:
        """The lines of a file. Raises HotError, with the line and the fix, for a broken one."""
        try:
            with path.open(newline="", encoding="utf-8") as file:
                reader = csv.reader(file)
                header = next(reader, [])
                if header != list(self.columns):
                    raise HotError(
                        f"{path}:1: the columns are {','.join(self.columns)}, not {','.join(header)!r}; {self._fix}"
                    )
                return [self._line(row, f"{path}:{reader.line_num}") for row in reader]
        except (OSError, UnicodeError, csv.Error) as error:
            raise HotError(f"{path}: {error}; {self._fix}") from error

    def check(self, records: Iterable[Any]) -> list[T]:
        """The same records. Raises HotError for one that could not be read again."""
        return [self._line([str(value) for value in astuple(record)], str(record)) for record in records]

    def write(self, records: Iterable[Any], path: Path) -> None:
        """Write a file whole; its folder is made if need be."""
        lines = io.StringIO(newline="")
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows(map(astuple, records))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda file: file.write(lines.getvalue().encode()))

    @property
    def _fix(self) -> str:
        return f"correct it, or remove it and measure again: {self.command}"

    def _line(self, row: Sequence[str], place: str) -> T:
        """A line of a file. Raises HotError with the place, the value and the fix."""
        if len(row) != len(self.columns):
            raise HotError(
                f"{place}: {len(row)} values, where {len(self.columns)} are needed ({','.join(self.columns)}); {self._fix}"
            )
        values = []
        for text, (name, (convert, is_right, meaning)) in zip(row, self.columns.items(), strict=True):
            try:
                values.append(convert(text))
            except ValueError:
                values.append(None)
            if values[-1] is None or not is_right(values[-1]):
                raise HotError(f"{place}: {name} {text!r} is not {meaning}; {self._fix}")
        return self.record(*values)


def name_of(device: torch.device) -> str:
    """What a file calls a device: the GPU's name, or the CPU's model; "" where there is no name to go by."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device) if torch.cuda.is_available() else ""
    return cpuinfo("model name") or platform.processor() or platform.machine() if device.type == "cpu" else ""


def cpuinfo(field: str) -> str:
    """A field of the first processor in /proc/cpuinfo, or "" where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.split(":")[0].strip() == field), "")
