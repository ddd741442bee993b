"""How fast text becomes ids: SentencePiece alone, and as `data` does it."""

from benchmarks.plan import Plan
from benchmarks.report import THIS, Table, against, against_header, cell, percent, rate
from benchmarks.rounds import Case, share

LISTS = "SentencePiece, lists of documents, all threads"
WAYS = {
    "SentencePiece, a document a call": "one_by_one",
    LISTS: "in_lists",
    "our tokenizer, lists of documents, all threads": "our_lists",
    "data.prepare, its processes started": "by_preparation",
}


def tokenising(plan: Plan) -> list[Table]:
    """Measure and lay out the speed of the tokenizer."""
    arguments = {"size": plan.text_bytes, "vocab_size": plan.vocab_size, "seconds": plan.seconds}
    cases = [
        Case(name, f"benchmarks.measured.tokenising:{way}", arguments, "tokenising", "SentencePiece" in name)
        for name, way in WAYS.items()
    ]
    results = plan.measured(cases, "tokenising")
    rows = []
    for name in WAYS:
        one, best = results[THIS, name], results[THIS, LISTS]
        of_best = cell(one, best) or percent(share(one, best))
        rows.append([name, rate(one, 1e6, ".2f"), of_best, *against(results, plan.baseline, name)])
    remark = (
        f"Vocabulary {plan.vocab_size}, the standard library of this Python, at most {plan.text_bytes / 1e6:.1f} MB."
    )
    return [Table("Tokenising", ["way", "MB/s", "of all threads", *against_header(plan.baseline)], rows, remark)]
