"""The environment `kubeflow`."""
