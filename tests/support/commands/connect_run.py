"""Connect, add up and leave, once for each job of a sweep: connect_run.py JOBS, one process of several."""

import os
import sys
import time

import torch
import torch.distributed as dist

from models.parallel.processes import connect_processes, leave_processes

if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    for job in range(int(sys.argv[1])):
        time.sleep(0.2 * rank * job)  # a process that is early must not find the addresses of the job before
        connect_processes("cpu")
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == dist.get_world_size()
        leave_processes()
