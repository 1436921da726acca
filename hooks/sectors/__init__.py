"""Keys and values of many requests in one range of the pool, page by page, and what is shared of them."""
