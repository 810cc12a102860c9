"""How a model is data parallel: where local and reduced gradients can be seen."""
