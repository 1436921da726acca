"""Where torch and transformers meet the project: adopted weights, the elastic KV cache, and how both get into a program."""
