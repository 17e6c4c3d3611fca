"""A recipe's data: from the rows of its files to what a model reads.

sources.py opens what the recipe names, and rows.py (json_rows.py, table_rows.py) reads its rows. Each becomes text, of which a
part is supervised (samples.py, by messages.py, order.py and keys.py), or two answers of which one is better, or a judged one
(preferences.py), through a chat template (chat_template.py, probes.py; one without marks by turn_by_turn.py), and then token
ids with a mask (encode.py; tokenise.py and workers.py do so for many). Such samples are chosen (mixing.py), packed into
sequences (packing.py) and stored (writer.py). A run reads the sequences (store.py), or makes them while it trains (stream.py);
each rank gets its own (sampling.py), as micro-batches (collate.py). build.py has the order of all this, prepare.py does it once
for each content.
"""
