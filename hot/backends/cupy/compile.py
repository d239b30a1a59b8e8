"""CUDA C++ to machine code, by NVRTC as CuPy binds it, kept on disk.

Not through cupy.RawModule: that one always flushes denormals (``-ftz=true``), and keeps code whose headers have changed.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

from hot.errors import BackendError
from hot.files import cache_folder, write_whole

FOLDER = Path(__file__).parent / "kernels"
OPTIONS = ("-std=c++17", "--fmad=false")  # every operation is rounded by itself, as the reference's are
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)', re.MULTILINE)


class Code(NamedTuple):
    """What a driver loads: the kernel's name as the compiler spells it, and the image (SASS, or PTX for a newer chip)."""

    name: str
    image: bytes


def compiled(source: str | Path, kernel: str, size: int, capability: tuple[int, int]) -> Code:
    """The code of one kernel for a chip, from disk if it was ever compiled here, from the same source and headers.

    source: the name of a file in ``kernels/``, or the absolute path of another. kernel: its name with its template arguments.
    size: bytes of its one parameter, a struct. Raises BackendError, with the file, the line and what stands there, if it does
    not compile, or with the file, if that cannot be read.
    """
    options = *OPTIONS, _architecture(capability)
    path = cache_folder() / "cubin" / f"{_digest(source, kernel, size, options)}.bin"
    try:
        return _read(path.read_bytes())
    except (OSError, ValueError):  # nothing there, or it is damaged
        code, _ = build(source, kernel, size, options)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda file: file.write(code.name.encode() + b"\0" + code.image))
    except OSError:
        pass  # a cache is no must
    return code


def build(source: str | Path, kernel: str, size: int, options: tuple[str, ...]) -> tuple[Code, str]:
    """Compile, whatever is on disk: the code, and what the compiler says."""
    from cupy_backends.cuda.libs import nvrtc

    path = FOLDER / source
    with _program(_text(path, kernel, size), str(path)) as program:
        nvrtc.addNameExpression(program, kernel)
        try:
            nvrtc.compileProgram(program, (*options, f"-I{path.parent}", f"-I{FOLDER}"))
        except nvrtc.NVRTCError:
            raise BackendError(_explained(nvrtc.getProgramLog(program), kernel)) from None
        image = nvrtc.getCUBIN(program) if "-arch=sm_" in "".join(options) else nvrtc.getPTX(program)
        return Code(nvrtc.getLoweredName(program, kernel), image), nvrtc.getProgramLog(program)


@contextmanager
def _program(text: str, path: str) -> Iterator[int]:
    from cupy_backends.cuda.libs import nvrtc

    program = nvrtc.createProgram(text, path, (), ())
    try:
        yield program
    finally:
        nvrtc.destroyProgram(program)


def _text(path: Path, kernel: str, size: int) -> str:
    """The source, and a check that its struct is as large as what the launcher packs."""
    try:
        text = path.read_text("utf-8", "replace")
    except OSError as error:
        raise BackendError(f"{kernel} does not compile: {path}: {error.strerror}") from error
    return f"""{text}
#line 1 "the launcher of {path.name}"
template <class P> __device__ P parameter_of(void (*)(P));
static_assert((sizeof(decltype(parameter_of(&{kernel}))) + 7) / 8 * 8 == {size}, "the layout is not that of the struct");
"""


def _digest(source: str | Path, kernel: str, size: int, options: tuple[str, ...]) -> str:
    from cupy_backends.cuda.libs import nvrtc

    path = FOLDER / source
    read = _text(path, kernel, size), _included(path), options, nvrtc.getVersion()
    return hashlib.sha256(repr(read).encode()).hexdigest()


def _included(source: Path) -> list[str]:
    """The text of all that a source includes, itself too, from wherever the compiler may look: the folder of what includes,
    that of the source, HOT's own."""
    found: dict[Path, str] = {}
    waiting = [source]
    while waiting:
        path = waiting.pop().resolve()
        if path not in found and path.is_file():
            found[path] = path.read_text("utf-8", "replace")
            places = path.parent, source.parent, FOLDER
            waiting += [place / name for name in INCLUDE.findall(found[path]) for place in places]
    return list(found.values())


def _read(kept: bytes) -> Code:
    name, image = kept.split(b"\0", 1)
    return Code(name.decode(), image)


@cache
def _architecture(capability: tuple[int, int]) -> str:
    """The option for a chip: its own machine code, or the newest virtual one for a chip that this NVRTC does not know yet."""
    from cupy_backends.cuda.libs import nvrtc

    own, known = capability[0] * 10 + capability[1], nvrtc.getSupportedArchs()
    return f"-arch=sm_{own}" if own in known else f"-arch=compute_{max(arch for arch in known if arch < own)}"


def _explained(log: str, kernel: str) -> str:
    """The first error of a log, with the line of source that it speaks of, then all of the log."""
    found = re.search(r"^(?P<file>.+)\((?P<line>\d+)\): (?:catastrophic )?error: (?P<what>.*)$", log, re.MULTILINE)
    if found is None:
        return f"{kernel} does not compile:\n{log.strip()}"
    path, number = Path(found["file"]), int(found["line"])
    lines = path.read_text("utf-8", "replace").splitlines() if path.is_file() else []
    shown = f"\n    {lines[number - 1].strip()}" if 0 < number <= len(lines) else ""
    return f"{kernel} does not compile: {path.name}:{number}: {found['what']}{shown}\n\n{log.strip()}"


def size_of(layout: str) -> int:
    """The bytes of a struct of that layout (`struct` module, native alignment), its end aligned for 8."""
    return struct.calcsize(f"{layout}0Q")
