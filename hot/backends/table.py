"""The op table: each op declared once, kernels attached per backend, third-party kernels included.

Declaring an op::

    @declare_op
    def pack4(codes: Tensor) -> Tensor:
        '''What it does, shapes, dtypes. … Equals: `the line of torch`'''
        return codes.new_empty(...)          # the body is the fake: what torch.compile sees

Attaching a kernel::

    @register_kernel("pack4", backend="mine", supports=lambda codes: codes.is_cuda)
    def pack4(codes: Tensor) -> Tensor: ...

Every kernel but the reference's is wrapped as ``torch.library`` custom op ``hot::<op>_<backend>`` with the declared fake,
so a converted layer compiles without graph breaks; where nobody watches, the function itself is called. The reference is plain
torch and is traced as such. A fused op has a composition: the same thing said with the smaller ops, which runs wherever no
fused kernel serves the call.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hot.backends.order import arrange, times_on
from hot.errors import BackendError, HotError
from hot.registry import Registry

REFERENCE = "reference"
AUTO = "auto"


@dataclass(frozen=True)
class Op:
    """An op: its fake (name, signature, docstring) and, for a fused op, its composition ``f(ops, *args)``."""

    fake: Callable[..., Any]
    composition: Callable[..., Any] | None = None

    @property
    def name(self) -> str:
        return self.fake.__name__

    @property
    def equals(self) -> str:
        """The line of torch that the op equals: the end of its docstring."""
        return (inspect.getdoc(self.fake) or "").rsplit("Equals:", 1)[1].strip()


@dataclass(frozen=True)
class Kernel:
    """One op on one backend. ``supports`` takes the op's arguments and says whether this kernel serves them.
    ``function``: ``call`` past torch's dispatcher."""

    op: str
    backend: str
    call: Callable[..., Any]
    supports: Callable[..., bool]
    function: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Backend:
    """Where kernels come from. ``probe`` says ``(available, reason)``; ``devices`` are torch device types.

    ``load`` imports the kernels: called once, when the backend is first used. ``priority`` orders the available
    backends under ``auto``, the highest first; those that were timed, `hot.backends.order` puts in the order of their times.
    ``float8`` says from how many elements of a product on integer codes that e4m3 holds exactly are to be given to it as such:
    faster on a chip with float8 tensor cores and none for 4 bits.
    """

    name: str
    devices: tuple[str, ...]
    probe: Callable[[], tuple[bool, str]]
    load: Callable[[], None] = lambda: None
    priority: int = 0
    float8: Callable[[], float] = lambda: math.inf

    def availability(self) -> tuple[bool, str]:
        """(available, reason): the reason says what is missing, or what it runs on."""
        try:
            return self.probe()
        except Exception as error:  # a probe that breaks is a backend that is missing
            return False, f"{type(error).__name__}: {error}"


OPS: dict[str, Op] = {}
backends: Registry[Backend] = Registry("backend")
kernels: Registry[Kernel] = Registry("kernel")


def declare_op(fake: Callable[..., Any], composition: Callable[..., Any] | None = None) -> Op:
    """Declare an op from its signature, its docstring (which ends in ``Equals: …``) and its fake as the body."""
    if "Equals:" not in (fake.__doc__ or ""):
        raise HotError(f"op {fake.__name__!r} must end its docstring with 'Equals: <the line of torch that it equals>'")
    if fake.__name__ in OPS:
        raise HotError(f"op {fake.__name__!r} is declared already, by {OPS[fake.__name__].fake.__module__}")
    op = OPS[fake.__name__] = Op(fake, composition)
    _ready.clear()
    return op


def declare_fused_op(composition: Callable[..., Any]) -> Callable[[Callable[..., Any]], Op]:
    """Declare an op whose meaning is ``composition(ops, *args)``, written with the smaller ops."""
    return partial(declare_op, composition=composition)


def register_backend(backend: Backend) -> Backend:
    """Add a backend. Raises HotError if the name is taken."""
    _ready.clear()
    return backends.register(backend.name)(backend)


def register_kernel(
    op: str, *, backend: str, supports: Callable[..., bool] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: attach a kernel for a declared op to a backend. Returns the function unchanged.

    ``supports(*args)`` gets the op's arguments and returns whether the kernel serves them; without it, it serves all.
    Raises HotError for an unknown op, or if that backend has a kernel for the op already.
    """
    if op not in OPS:
        raise HotError(f"unknown op {op!r}; the ops are {', '.join(sorted(OPS))}")

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        if f"{backend}.{op}" in kernels:  # before the custom op of the first one is replaced
            raise HotError(f"backend {backend!r} has a kernel for op {op!r} already")
        call = function if backend == REFERENCE else _custom_op(op, backend, function)
        kernels.register(f"{backend}.{op}")(Kernel(op, backend, call, supports or _serves_all, function))
        _ready.clear()
        return function

    return add


def _serves_all(*args: Any, **kwargs: Any) -> bool:
    return True


_libraries: dict[str, torch.library.Library] = {}


def _custom_op(op: str, backend: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as ``torch.ops.hot.<op>_<backend>``, defined by hand: torch.library.custom_op's checks of every call cost as
    much as the launch of a kernel."""
    name, fake = f"{op}_{backend}", OPS[op].fake
    if name in _libraries:  # a backend that was taken out and comes again
        _libraries.pop(name)._destroy()
    library = _libraries[name] = torch.library.Library("hot", "FRAGMENT")
    schema = torch.library.infer_schema(fake, mutates_args=())
    library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hot::{name}", fake, lib=library)
    return getattr(torch.ops.hot, name).default


class Ops:
    """The ops of one backend on one device type, as attributes: ``ops.hadamard(x, 16)``. Get it from `ops_for`.

    A call goes to the first kernel that supports its arguments, else to the op's composition over these same ops. An
    explicit backend that has neither raises BackendError; ``auto`` ends with the reference. The kernels of a chain, which is
    given by priority, are put in the order of `hot.backends.order` here, for the current device of the type, once.
    """

    def __init__(self, backend: str, device: str, chain: tuple[str, ...]) -> None:
        self.backend, self.device = backend, device
        self.float8 = backends[chain[0]].float8() if chain else math.inf
        self.kernels: dict[str, tuple[Kernel, ...]] = {}
        times = times_on(torch.device(device)) if len(chain) > 1 else {}
        for op in OPS:
            able = [name for name in chain if f"{name}.{op}" in kernels]
            self.kernels[op] = tuple(kernels[f"{name}.{op}"] for name in arrange(able, times.get(op, ())))
        for op in OPS:
            setattr(self, op, self._caller(op))

    def _caller(self, op: str) -> Callable[..., Any]:
        candidates, composition = self.kernels[op], OPS[op].composition

        def call(*args: Any, **kwargs: Any) -> Any:
            for kernel in candidates:
                if kernel.supports(*args, **kwargs):
                    run = kernel.call if kernel.function is None or _is_watched(*args) else kernel.function
                    return run(*args, **kwargs)
            if composition is None:
                raise BackendError(
                    f"backend {self.backend!r} has no kernel for op {op!r} with these arguments; use backend: auto"
                )
            return composition(self, *args, **kwargs)

        return call

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(f"no op {name!r}; the ops are {', '.join(sorted(OPS))}")

    def serving(self, op: str) -> str:
        """Which backend's kernel is tried first for an op, or ``composition``: for tables."""
        return self.kernels[op][0].backend if self.kernels[op] else "composition"


def _is_watched(*args: Any) -> bool:
    """Whether a call must go through torch's dispatcher, which takes as long as the launch of a kernel: because it is traced or
    differentiated, a mode intercepts it, or its first argument is no plain tensor."""
    return (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or not args
        or type(args[0]) not in _PLAIN
    )


_PLAIN = (torch.Tensor, torch.nn.Parameter)


_ready: dict[tuple[str, str], Ops] = {}


def get_ops(backend: str, device: str) -> Ops:
    """`ops_for`, kept: choosing kernels takes no time in a step, and is no part of a compiled graph."""
    if torch.compiler.is_compiling():
        from torch._dynamo.comptime import comptime

        comptime(_choose_while_tracing)
    ops = _ready.get((backend, device))
    if ops is None:
        ops = _ready[backend, device] = ops_for(backend, device)
    return ops


def _choose_while_tracing(context: Any) -> None:
    """What `get_ops` does where its frame is traced before it ever ran: then the graph only looks the ops up."""
    key = tuple(context.get_local(name).as_python_constant() for name in ("backend", "device"))
    if key not in _ready:
        _ready[key] = ops_for(*key)


def require(backend: str) -> None:
    """Raise BackendError, with the reason, if a backend that was named is missing here; ``auto`` never is."""
    if backend == AUTO:
        return
    available, reason = backends[backend].availability()
    if not available:
        raise BackendError(f"backend {backend!r} is not available: {reason}; use backend: auto")


def ops_for(backend: str, device: str) -> Ops:
    """The ops of a backend (or ``auto``) for a torch device type.

    Raises UnknownNameError for an unknown backend, BackendError if it is missing here or not for that device.
    """
    require(backend)
    if backend != AUTO:
        entry = backends[backend]
        if device not in entry.devices:
            raise BackendError(
                f"backend {backend!r} runs on {', '.join(entry.devices)}, not on {device}; use backend: auto"
            )
        entry.load()
        return Ops(backend, device, (backend,))
    fitting = [entry for entry in (backends[name] for name in backends) if device in entry.devices]
    chain = []
    for entry in sorted(fitting, key=lambda entry: -entry.priority):
        available, reason = entry.availability()
        if available:
            entry.load()
            chain.append(entry.name)
        else:
            warnings.warn(f"backend auto: {entry.name} is left out on {device}: {reason}", stacklevel=2)
    return Ops(backend, device, tuple(chain))
