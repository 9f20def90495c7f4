"""How long a step of training takes, before anything is built or started, and which division over ranks is best.

`collectives` and `cluster` say what messages cost, `work` what a model computes, `step` what one rank does of it;
`prediction` puts them together with the memory of `unidist.estimating`, and `search` tries what strategies propose.
A strategy takes part by the power `PredictsStepTime` of `interface`.
"""
