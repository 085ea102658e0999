"""Saving: what is behind `Snapshotter.save`.

due             is this call a snapshot? it may have to wait for the outcome of the one before
filling         the thread that copies what was staged into the slot that the SMP grants
open_receipts   what becomes of a snapshot, as its receipt and the next ones say it
"""
