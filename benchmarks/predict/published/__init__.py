"""The predictor against measurements that others published."""
