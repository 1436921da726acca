"""How replicas share a model: groups, drops and restores, costs and batches of a pipeline (KunServe). Pure."""
