"""Measures where the time of a model goes, and predicts what an accelerator would change.

profile         `profile`
where           the devices that are measured, and those that are predicted
bench           one model on one device: timed and counted
timing          medians that can be trusted
accelerator     data sheets of accelerators
calibrate       the same numbers, measured
predict         what a run would take elsewhere
verdict         whether moving pays, and from which batch size
result          what `profile` returns
table, plot     how it is shown
progress        a bar while it runs
example_inputs  inputs of any batch size
"""
