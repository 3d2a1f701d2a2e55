"""Commands that talk to a running server: `python3 -m launcher_scripts.clients NAME ...`."""

import os

# A fork of this process runs another program. gRPC's handlers of forks, which would let the child
# use gRPC, can abort it before that. gRPC reads this when it is imported, which happens in here.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# name of the command -> what it does
CLIENTS = {
    "issue_request": "send the request of a JSON file and print every output",
    "identity_test": "time ten requests of token ids to a GPT and print what it generates",
    "end_to_end_test": "text through preprocessing, model, postprocessing and the ensemble",
    "interactive_identity_test": "one session of several requests of token ids",
    "interactive_end_to_end_test": "one session of text, model by model and through the ensemble",
    "word_list": "words as the ids and end offsets of a words list, for a request file",
    "refit": "send the tensors of a safetensors file to a server that serves the same model",
    "chat": "talk to a model in the terminal",
}
# command -> its module and function, where these are not its name and `main`
FUNCTIONS = {
    "interactive_identity_test": ("identity_test", "session_main"),
    "interactive_end_to_end_test": ("end_to_end_test", "text_session_main"),
    "word_list": ("end_to_end_test", "words_main"),
}
