"""Hand-written CPU training of the sensor network: convolution, pooling and dropout in one pass."""
