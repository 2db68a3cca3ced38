"""Fault injection: seeded combinations of faults over executors, overlap and algorithms, and what must hold after each.

python -m tests.chaos --seconds 600 --seed 1      # make chaos SECONDS=600 SEED=1
python -m tests.chaos --case 17                   # repeat one case
"""
