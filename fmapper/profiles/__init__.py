"""Measures where the time of a model goes, and predicts what an accelerator would change.

profile         `profile`
where           chooses the devices to measure, and those to predict
bench           times and counts one model on one device
timing          medians of many rounds
accelerator     data sheets of accelerators
calibrate       measures the numbers of a data sheet
predict         predicts the time of a run on an accelerator
verdict         decides whether an accelerator pays, and from which batch size
result          `Profile`, the result
table, plot     print it and draw it
progress        the progress bar
example_inputs  inputs of any batch size
"""
