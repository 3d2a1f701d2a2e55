"""Commands that talk to a running server: `python3 -m launcher_scripts.clients NAME ...`."""

# name of a module here, and of the command -> what it does
CLIENTS = {
    "issue_request": "send the request of a JSON file and print every output",
    "identity_test": "time ten requests of token ids to a GPT and print what it generates",
    "end_to_end_test": "text through preprocessing, model, postprocessing and the ensemble",
    "interactive_identity_test": "one session of several requests of token ids",
    "interactive_end_to_end_test": "one session of text, model by model and through the ensemble",
    "word_list": "words as the ids and end offsets of a words list, for a request file",
    "chat": "talk to a model in the terminal",
}
