"""What compare.py is made of: plan (which runs), run (training and evaluating them), statistics, report.

`experiments/` may import everything below it (training, data, model); nothing imports `experiments/`.
"""
