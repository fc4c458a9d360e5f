"""The launcher: starts the rank processes of a run on one host or several, passes signals on, and reports the first failure.

rendezvous       runs a command as the ranks of this host until all have ended; launchers of several hosts connect,
                 number their ranks, and restart when hosts come or go
rank_processes   the processes of one start on this host, and the signals that end them
messages         checked messages, and the authenticated connection between launchers
ssh              the same launchers on the hosts of a hostfile, over ssh; the leader runs here
self_test        a trial launch on this host
"""
