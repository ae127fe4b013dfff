"""The planning annex: clusters, disaggregated serving and split federated training, planned before anything runs."""
