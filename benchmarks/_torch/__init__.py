"""PyTorch's versions of the benchmarks' problems. Imported only where PyTorch is installed."""
