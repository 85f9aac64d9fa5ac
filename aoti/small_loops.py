"""From how much work on a loop that torch's compiler generates is worth more than one thread.

torch opens a parallel region for every loop, since it knows neither the number of threads nor, often, the sizes. mctl's
variants have `#pragma omp parallel if(WORK >= N)` there: a loop that is shorter than starting the others stays alone.
A team of one does what one thread would.
"""

import re

# Work is elements times the lines of code for 16 of them, where a function counts as many lines. Two threads that are
# awake are as fast as one at about 20,000 (tanh), 40,000 (softmax), 30,000 to 120,000 (gelu), 110,000 to 230,000 (x+1),
# and not yet at 110,000 in a layer norm of four loops: tests/bench/loops.py. Where threads sleep or lack a core, a
# region costs a hundred times as much, so that the limit is among the larger of these.
ENOUGH_WORK = 1 << 17
_VECTOR = 16
_FUNCTION_LINES = 16
_FUNCTION = re.compile(r"\b(?:a?(?:sin|cos|tan)h?|atan2|erf\w*|f?exp\w*|log(?:1p|2|10)?|pow|lgamma|hypot)\(")


def work_of_code(code: str, elements: int) -> int:
    """That of one element: `code` is C++ that computes so many of them at once."""
    lines = code.count("\n") + _FUNCTION_LINES * len(_FUNCTION.findall(code))
    return -(-lines * _VECTOR // elements)
