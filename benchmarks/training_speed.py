"""How fast training goes as `train.py` does it, what share of the machine that is, and what memory it takes."""

import statistics

from benchmarks.limits import peak_of, products
from benchmarks.plan import Plan
from benchmarks.report import THIS, Table, against, against_header, cell, percent, rate
from benchmarks.rounds import Case, Results, share
from benchmarks.workloads import Settings, model_of, with_training
from model.flops import training_flops


def training(plan: Plan) -> list[Table]:
    """Measure and lay out the training of each workload, in each precision and compiled or not as asked for."""
    runs = {
        " ".join(filter(None, ("train", name, precision, compiled and f"compile {compiled}"))): (name, settings)
        for name, workload in with_adamw(plan.workloads).items()
        for precision in plan.precisions
        for compiled in plan.compile
        for settings in [with_training(workload, precision=precision, compile=compiled)]
    }
    cases = [
        # A process each: its peak memory is asked for.
        Case(case, "benchmarks.measured.training:steps", {"workload": settings, "seconds": plan.seconds}, case)
        for case, (_, settings) in runs.items()
    ]
    peers = {
        f"train {name} by Hugging Face, compile {compiled}": (f"{name}, Hugging Face", compiled, workload)
        for name, workload in plan.workloads.items()
        for compiled in ("off", "on")
    }
    function = "benchmarks.measured.hugging_face:training"
    cases += [
        Case(case, function, {"workload": settings, "compiled": compiled == "on", "seconds": plan.seconds}, case, True)
        for case, (_, compiled, settings) in peers.items()
    ]
    runs |= {case: (name, settings) for case, (name, _, settings) in peers.items()}
    results = plan.measured([*products(plan), *cases], "training")
    header = ["run", "computed", "tokens/s", "GFLOP a token", "GFLOP/s", "of the peak", "of products beside it"]
    rows = [
        [name, *cells(results, case, settings), *against(results, plan.baseline, case)]
        for case, (name, settings) in runs.items()
    ]
    remark = (
        "Whole steps: windows, forward, backward, clipping, optimizer. FLOPs: model/flops.py. The peak is that of "
        "matrix products in the same precision, measured in the same rounds: the fastest of many. Products beside it: "
        "the mean rate of such products right after the steps, so disturbed by other work as these were. Memory: a "
        "fresh process at its most, without what Python and PyTorch take before the run is built. First step: with "
        "what is done once, compiling above all. Hugging Face: LlamaForCausalLM of the same shape, all windows of a "
        "step at once, with AdamW."
    )
    last = ["peak memory, GiB", "first step, s"]
    return [Table("Training", [*header, *last, *against_header(plan.baseline)], rows, remark)]


def with_adamw(workloads: dict[str, Settings]) -> dict[str, Settings]:
    """Return the workloads, and beside one with another optimizer the same with AdamW, as others train."""
    found: dict[str, Settings] = {}
    for name, workload in workloads.items():
        found[name], optimizer = workload, workload.get("optimizer", {})
        if optimizer.get("method", "adamw") != "adamw":
            found[f"{name}, AdamW"] = {**workload, "optimizer": {**optimizer, "method": "adamw"}}
    return found


def cells(results: Results, case: str, settings: Settings) -> list[str]:
    """Return the figures of one run."""
    result, flops = results[THIS, case], training_flops(model_of(settings))
    if result.error is not None:
        return [cell(result), *["-"] * 7]
    computed, compiled = result.notes["precision"], result.notes["compile"]
    peak = peak_of(results, computed)
    return [
        f"{computed}, compile {compiled}",
        rate(result),
        f"{flops / 1e9:.3f}",
        f"{result.rate * flops / 1e9:,.1f}",
        cell(peak) or percent(share(result, peak, flops)),
        percent(flops * statistics.median(result.notes["shares"][1:])),  # the first round warms up
        f"{result.memory / 2**30:.2f}",
        f"{result.notes['first_step']:.1f}",
    ]
