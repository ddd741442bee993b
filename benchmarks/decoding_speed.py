"""How fast text is written, for one prompt and for many: each decoder and precision, and Hugging Face beside them."""

from importlib.util import find_spec
from typing import NamedTuple

from benchmarks.limits import reading
from benchmarks.plan import Plan
from benchmarks.report import THIS, Table, against, against_header, cell, percent, rate
from benchmarks.rounds import Case, Results, share
from benchmarks.workloads import Settings, model_of
from model.flops import matmul_parameters

BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
HUGGING_FACE, LLAMA_CPP = "Hugging Face", "llama.cpp"
PEERS = {
    HUGGING_FACE: "benchmarks.measured.hugging_face:decoding",
    LLAMA_CPP: "benchmarks.measured.llama_cpp:llama_cpp",
}


class Way(NamedTuple):
    """One way to write text."""

    decoder: str
    weights: str

    def case(self, plan: Plan, name: str, workload: Settings, prompts: int) -> Case:
        """Return the measurement of this way for so many prompts at once."""
        arguments = {
            "model": workload["model"],
            "prompts": prompts,
            "new_tokens": plan.new_tokens,
            "precision": self.weights,
            "seconds": plan.seconds,
        }
        theirs = self.decoder in PEERS
        return Case(
            self.name(name, prompts),
            PEERS.get(self.decoder, "benchmarks.measured.decoding:ours"),
            arguments if theirs else {**arguments, "decoder": self.decoder},
            # llama.cpp has threads of its own, which must not meet PyTorch's.
            process=f"decode {name}{' by llama.cpp' if self.decoder == LLAMA_CPP else ''}",
            of_machine=theirs,
        )

    def name(self, workload: str, prompts: int) -> str:
        """Return the name of that measurement."""
        return f"decode {workload} {self.decoder} {self.weights} {prompts}"


def ways(plan: Plan) -> list[Way]:
    """Return every way; those that are not there say so in their cells."""
    readers = [*PEERS, *plan.decoders]
    return [
        Way(decoder, weights) for decoder in readers for weights in plan.weights if is_worth_a_row(decoder, weights)
    ]


def is_worth_a_row(decoder: str, weights: str) -> bool:
    """Say whether a decoder reads these weights in a way of its own here.

    Without a GPU only the native and the compiled one read fewer bytes for fewer bits; Hugging Face's multiplies them
    so slowly where the CPU has no bfloat16 instructions that it would take the rest of the day. llama.cpp is no
    dependency; where it is not installed, one row says so.
    """
    from training.hardware import best_precision, choose_device

    if decoder == LLAMA_CPP:
        return weights == "fp32" or find_spec("llama_cpp") is not None
    if decoder == HUGGING_FACE:
        return weights == "fp32" or weights == best_precision(choose_device("auto"))
    return weights == "fp32" or decoder in ("native", "compiled") or choose_device("auto").type != "cpu"


def decoding(plan: Plan) -> list[Table]:
    """Measure and lay out the decoding of each workload."""
    return [_table(plan, name, workload) for name, workload in plan.workloads.items()]


def _table(plan: Plan, name: str, workload: Settings) -> Table:
    weights = matmul_parameters(model_of(workload))
    cases = [way.case(plan, name, workload, prompts) for way in ways(plan) for prompts in (1, plan.prompts)]
    sizes = [plan.beyond_cache, *(weights * size for size in BYTES.values())]
    results = plan.measured([*reading(plan, sizes), *cases], f"decoding {name}")
    rows = [[way.decoder, *_cells(plan, results, name, way, weights)] for way in ways(plan)]
    header = ["decoder", "weights", "one, tokens/s", "of the memory's limit", "of the limit of its size"]
    many = [f"{plan.prompts}, tokens/s", "times one"]
    versus = [f"{title}, {prompts}" for prompts in ("one", plan.prompts) for title in against_header(plan.baseline)]
    remark = (
        f"{plan.new_tokens} new tokens, greedy. The limit for one: a token reads {weights / 1e6:.1f} million weights; "
        f"the memory reads {plan.beyond_cache // 2**20} MiB, or as many bytes as the weights have, again and again at "
        "the rate measured in the same rounds (weights that fit the cache can pass the first limit, never the second)."
        + _agreement(plan, results, name)
    )
    return Table(f"Decoding, {name}", [*header, *many, *versus], rows, remark)


def _agreement(plan: Plan, results: Results, name: str) -> str:
    """Say how far llama.cpp writes the text that the definition of the network writes in float32."""
    theirs = {way.weights: results[THIS, way.name(name, 1)] for way in ways(plan) if way.decoder == LLAMA_CPP}
    agreed = [f"{weights} {found.notes['agrees']}" for weights, found in theirs.items() if found.error is None]
    return f" Tokens until llama.cpp's text parts from ours in fp32: {', '.join(agreed)}." if agreed else ""


def _cells(plan: Plan, results: Results, name: str, way: Way, weights: int) -> list[str]:
    one, many = (results[THIS, way.name(name, prompts)] for prompts in (1, plan.prompts))
    read_as = one.notes.get("read_as", way.weights)
    size = weights * BYTES[read_as]
    memory, cache = (results[THIS, f"read {limit}"] for limit in (plan.beyond_cache, size))
    return [
        way.weights if read_as == way.weights else f"{way.weights}, read as {read_as}",
        rate(one),
        (cell(one, memory) and "-") or percent(share(one, memory, size)),
        (cell(one, cache) and "-") or percent(share(one, cache, size)),
        rate(many),
        (cell(one, many) and "-") or f"{share(many, one):.1f}",
        *(part for prompts in (1, plan.prompts) for part in against(results, plan.baseline, way.name(name, prompts))),
    ]
