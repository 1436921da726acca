"""One model over several replicas: a group runs its requests as a pipeline (KunServe)."""
