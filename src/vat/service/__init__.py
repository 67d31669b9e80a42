"""`vat serve`: segmentation and correspondence over HTTP, and the page that shows them.

`core` owns the models and the queue, `app` is what the web server runs, `guard` stands before it.
"""
