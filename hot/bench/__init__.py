"""`hot bench`: what kernels and layers take, against copy bandwidth, torch's products and dense layers in the same run."""
