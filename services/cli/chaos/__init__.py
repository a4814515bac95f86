"""`hexflow chaos`: kills what can be killed, and counts what became of every query.

`faults` plans, `supervisor` strikes and repairs, `journal` is what the producer itself wrote down,
`ledger` what the raw topics say, `audit` holds the two against each other; `run` puts them
together.
"""
