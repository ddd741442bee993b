"""What the machine can do at most: the figures that all shares are shares of."""

from benchmarks.plan import Plan
from benchmarks.report import THIS, Table, rate
from benchmarks.rounds import Case, Result, Results

DEFAULT, ONEDNN, BF16 = "fp32, PyTorch's default", "fp32, through oneDNN", "bf16"
PRODUCTS = {DEFAULT: ("fp32", False), ONEDNN: ("fp32", True), BF16: ("bf16", False)}


def products(plan: Plan) -> list[Case]:
    """Return the measurements of matrix products."""
    return [
        Case(
            f"matmul {name}",
            "benchmarks.measured.peaks:matmul",
            {"precision": precision, "onednn": onednn, "seconds": 0.4 * plan.seconds},
            "limits",
            of_machine=True,
        )
        for name, (precision, onednn) in PRODUCTS.items()
    ]


def reading(plan: Plan, sizes: list[int]) -> list[Case]:
    """Return the measurements of reading memory, so many bytes each."""
    return [
        Case(
            f"read {size}",
            "benchmarks.measured.peaks:read",
            {"size": size, "seconds": 0.3 * plan.seconds},
            "limits",
            of_machine=True,
        )
        for size in dict.fromkeys(sizes)
    ]


def peak_of(results: Results, precision: str) -> Result:
    """Return the measured peak of a precision; of float32 the faster of its two ways, both exact."""
    names = {"fp32": [DEFAULT, ONEDNN], "bf16": [BF16]}.get(precision, [])
    ways = [results[THIS, f"matmul {name}"] for name in names]
    usable = [way for way in ways if way.error is None and way.notes["exact"]]
    if not usable:
        return Result(error=f"no peak of {precision} was measured")
    return max(usable, key=lambda way: way.rate)


def limits(plan: Plan) -> list[Table]:
    """Measure and lay out matrix products and memory."""
    small = plan.beyond_cache // 64
    results = plan.measured([*products(plan), *reading(plan, [plan.beyond_cache, small])], "limits")
    rows = [[f"matrix product, {name}", *product(results[THIS, f"matmul {name}"])] for name in PRODUCTS]
    for size in (plan.beyond_cache, small):
        rows.append([f"memory read, {size / 2**20:,.3g} MiB", rate(results[THIS, f"read {size}"], 1e9, ",.1f"), "GB/s"])
    remark = (
        "Products: the fastest of square ones. Memory: the fastest of three reductions over the same bytes again and "
        "again. All threads; medians over the rounds."
    )
    return [Table("What the machine can do", ["", "rate", "unit"], rows, remark)]


def product(result: Result) -> list[str]:
    """Return the cells of a matrix product."""
    if result.error is None and not result.notes["exact"]:
        return ["-", "rounds its factors to bf16 here, so it is not used"]
    return [rate(result, 1e9, ",.1f"), "GFLOP/s"]
