"""A recipe becomes a model, a stream and a Trainer, and a run leaves a folder; it ends whole, however it is ended.

What never belongs here: the words of a command line beyond LightningCLI's, or many runs at once (that is `cli`).
"""
