"""Call frame information, stacks and structures of Python that are made up; tests/fuzz has it for ten minutes."""

from fuzz import fuzz_unwinding
from thorough import thorough

CASES = 400  # 10 s of CPU time


@thorough
def test_what_is_made_up_ends_in_a_known_way() -> None:
    outcomes = {fuzz_unwinding.one(seed) for seed in range(CASES)}
    assert outcomes >= {
        "walked: WHOLE", "walked: STUCK", "walked: DAMAGED", "walked: MEMORY", "interpreter",
        "no interpreter", "layout", "no layout", "objects",
    }  # fmt: skip
