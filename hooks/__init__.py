"""Where torch and transformers meet the project: adopted weights, the elastic KV cache, how both enter a program."""
