"""Tests of predictions and confusion matrices of a deployment, in which only the server's model is tested."""

import pandas as pd
import pytest

from lightning_fcl.evaluation import read_run


@pytest.mark.seconds
def test_serve_prediction_writer_writes_predictions_of_server_only(rehearsal, wire):
    callbacks = [{"class_path": "Ditto"}, {"class_path": "PredictionWriter"}]
    deployed = rehearsal({"trainer": {"max_epochs": 1, "callbacks": callbacks}})
    deployed.simulate()
    deployed.serve(wire(deployed.nodes()), min_clients=3)
    run = read_run(deployed.folder / "deployed")
    table = pd.read_csv(deployed.folder / "deployed" / "predictions.csv", dtype=str)
    assert {*table["model"]} == {"server"} == {*run.confusion["model"]}
    counts = run.confusion.set_index(["target", "prediction"])["count"].to_dict()
    assert table.groupby(["target", "prediction"]).size().to_dict() == counts
