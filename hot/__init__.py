"""HOT: Hadamard-based optimized training. The backward pass of a PyTorch model made cheap, its forward pass left exact.

policy = hot.load_policy("hot")       # a preset or a YAML file
report = hot.convert(model, policy)   # in place
hot.revert(model)
"""

from hot.backends import Backend, register_backend, register_kernel
from hot.calibrate import calibrate
from hot.convert import HotConv2d, HotLinear, Report, convert, revert
from hot.errors import BackendError, ConversionError, HotError, PolicyError, UnknownNameError
from hot.executor import conv2d, linear
from hot.policies.buffers import Buffer, register_buffer
from hot.policies.plan import GradInputPlan, GradWeightPlan, LayerPlan, Skip
from hot.policies.quantizers import Operand, Quantizer, register_quantizer
from hot.policies.resolve import resolve
from hot.policies.save import save_policy
from hot.policies.schema import Policy, load_policy
from hot.policies.transforms import Transform, register_transform

__version__ = "0.1.0"

__all__ = [
    "Backend", "BackendError", "Buffer", "ConversionError", "GradInputPlan", "GradWeightPlan", "HotConv2d", "HotError",
    "HotLinear", "LayerPlan", "Operand", "Policy", "PolicyError", "Quantizer", "Report", "Skip", "Transform",
    "UnknownNameError", "calibrate", "conv2d", "convert", "linear", "load_policy", "register_backend", "register_buffer",
    "register_kernel", "register_quantizer", "register_transform", "resolve", "revert", "save_policy",
]  # fmt: skip
