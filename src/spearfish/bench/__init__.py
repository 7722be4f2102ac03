"""Measure the kernels against their rivals and against what the chip allows, and say so in tables and plots.

`problems` names what is measured, `implementations` and `peers` who takes part, `device` times, `check` looks at the
results before anybody is timed, `runner` drives, `results` keeps, `report` and `plot` show.
"""
