"""How much memory training takes on one rank: arithmetic on figures, before anything is built or started.

`figures` says what is trained, `memory` what one rank holds of it, `estimate` puts both together: every strategy
with the power `EstimatesMemory` says what it changes.
"""
