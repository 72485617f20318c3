"""Sizes of the model and of its decoders as published, over configs/node/: the shipped settings are smaller, and change with what validation prefers."""

SIZES = {
    "cora": [
        "model.num_factors=16",
        "model.factor_dim=32",
        "model.dropout=0.85",
        "model.routing_iterations=10",
        "model.factor_layers=3",
        "ci.every_steps=5",
    ],
    "photo": [
        "model.num_factors=32",
        "model.factor_dim=16",
        "model.dropout=0.62",
        "model.num_layers=6",
        "model.routing_iterations=8",
        "model.routing_final_norm=false",
        "model.structure_layers=4",
        "model.factor_layers=4",
        "ci.every_steps=5",
    ],
}
