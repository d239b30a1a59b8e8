"""`hot check`: every registered kernel, third-party ones too, against the meaning of its op in float64.

from hot.checking import check, find_case
rows = check(backend="triton", op="quantize")
find_case("quantize/float32/sliced/7", "cuda").args      # the arguments of a case that failed
"""

from hot.checking.cases import Case, cases, find_case, register_cases
from hot.checking.runner import Row, check

__all__ = ["Case", "Row", "cases", "check", "find_case", "register_cases"]
