"""What takes long to measure: speed, memory and what schemes cost.

`python -m benchmarks` is the whole of it; `benchmarks.cost` and `benchmarks.schemes` ask one question each. What runs
against the clock lies in `measured/`, and runs in processes of its own (`processes.py`), in turn (`rounds.py`).
"""
